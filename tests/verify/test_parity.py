"""Each strategy against one process in float64, on batches made to be awkward."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from mutants import planted
from torch import nn

from marks import by_hand
from nccl_trace import traced
from phalanx.comm.axes import AXIS_SETS
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry
from phalanx.config import OptimizerConfig
from phalanx.data.samples import Batch
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.loss import IGNORE
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import Plan
from phalanx.parallel.whole_matrix import Owners
from phalanx.strategy import Strategy
from phalanx.train import optimizer
from phalanx.verify.batches import decoder_batches, split
from phalanx.verify.cases import decoder_case
from phalanx.verify.harness import verify, verify_case
from phalanx.verify.record import Case
from phalanx.verify.verdict import Verdict

LLAMA = ModelShape(
    vocab_size=67,  # odd
    num_layers=2,
    hidden=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    ffn=48,
    max_seq_len=32,
    tied=True,
    dropout=0.1,
)
GPT2 = dataclasses.replace(
    LLAMA,
    num_kv_heads=8,
    norm="layer",
    position="learned",
    mlp="gelu",
    bias=True,
    tied=False,
    dropout=0.2,
)
WINDOWED = dataclasses.replace(
    LLAMA,
    norm="rms+1",
    norm_at="both",
    window=5,
    full_every=2,
    window_theta=100.0,
    mlp="geglu",
    bias="qkv",
    qk_norm="projection",
    scaled_embedding=True,
)
SEED = 3
NUM_STEPS = 2


OF_TWO = ("dp2", "dp2:naive", "fsdp2:zero1", "fsdp2:zero2", "fsdp2")
OF_FOUR = ("dp4", "fsdp4:zero1", "fsdp4:zero2", "fsdp4")
OF_TWO_AXES = ("dp2,fsdp2:zero1", "dp2,fsdp2:zero2", "dp2,fsdp2")


def case_of(
    shape: ModelShape,
    accumulation: int,
    num_rows: int,
    num_data_ranks: int,
    num_steps: int = NUM_STEPS,
) -> Case:
    batches = decoder_batches(shape, num_steps, num_rows, 17, num_data_ranks, SEED)
    case = decoder_case(shape, batches, SEED, OptimizerConfig(warmup_steps=1))
    return dataclasses.replace(case, accumulation=accumulation)


def jobs(*texts: str, marks: Any = ()) -> list[Any]:
    """Return the strategies as cases of a test, those of as many ranks as one: a job for all."""
    groups: dict[int, list[str]] = collections.defaultdict(list)
    for text in texts:
        groups[Strategy.parse(text).num_ranks].append(text)
    return [pytest.param(group, id=f"{n} ranks", marks=marks) for n, group in groups.items()]


def verdicts_on_ranks(pairs: Sequence[tuple[Case, Strategy]]) -> list[Verdict]:
    found: list[Verdict] = []
    for case, strategy in pairs:
        try:
            found.append(traced(verify_case, case, strategy, Ranks(strategy)))
        except Exception as error:
            error.add_note(f"verifying {strategy}")
            raise
    return found


def check_parity(subtests: pytest.Subtests, pairs: Sequence[tuple[Case, Strategy]]) -> None:
    """Compare, count, and hold against the rules of NCCL, all in one job."""
    (num_ranks,) = {strategy.num_ranks for _, strategy in pairs}
    verdicts = run_ranks(verdicts_on_ranks, num_ranks, pairs)[0]
    for (case, strategy), verdict in zip(pairs, verdicts, strict=True):
        with subtests.test(str(strategy), accumulation=case.accumulation):
            assert verdict.is_equal, str(verdict)
            assert max(d.error for d in verdict.differences) <= 1e-10
            check_twin(case, strategy, verdict.entries)


# 13 rows over 2 or 4 ranks are uneven shares; every second step the first rank has no valid token.
@pytest.mark.parametrize(
    ("strategies", "accumulations"),
    [
        (("dp2", "fsdp2"), (3,)),
        by_hand(OF_TWO_AXES[2:], (3,)),
        by_hand([text for text in OF_TWO if text not in ("dp2", "fsdp2")], (3,)),
        by_hand(OF_TWO_AXES[:2], (3,)),
        by_hand(OF_TWO, (1,)),
        by_hand(OF_FOUR, (1, 3)),
        by_hand(OF_TWO_AXES, (1,)),
    ],
)
def test_llama_ties_dropout_odd_vocabulary(
    strategies: Sequence[str], accumulations: Sequence[int], subtests: pytest.Subtests
) -> None:
    pairs: list[tuple[Case, Strategy]] = []
    for strategy in map(Strategy.parse, strategies):
        for accumulation in accumulations:
            case = case_of(LLAMA, accumulation, 13, strategy.data_ranks, 3)
            batches = split_over_ranks(case, strategy)
            assert any((batch.labels_BT == IGNORE).all() for batch in batches)
            pairs.append((case, strategy))
    check_parity(subtests, pairs)


@pytest.mark.parametrize(
    "texts",
    [
        *jobs("fsdp2:zero1", "tp2:megatron"),
        *jobs(
            *("dp2", "fsdp2", "fsdp2:zero2", "fsdp2,recompute:full", "tp2", "pp2", "cp2", "fsdp3"),
            *("dp2,fsdp2", "tp4:2d", "fsdp2,tp2", "dp2,cp2", "pp2,fsdp2", "dp2,fsdp3"),
            *("fsdp2,cp2,tp2", "tp8:3d", "tp8:2.5d/2"),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("kind", ["match_rms_adamw", by_hand("original")])
def test_muon(texts: Sequence[str], kind: Any, subtests: pytest.Subtests) -> None:
    shape = dataclasses.replace(LLAMA, num_kv_heads=8)
    settings = OptimizerConfig(
        kind="muon", adjust_lr=kind, nesterov=kind == "original", matrix_lr=3e-2, warmup_steps=1
    )
    pairs: list[tuple[Case, Strategy]] = []
    for strategy in map(Strategy.parse, texts):
        case = case_of(shape, 2, 13, strategy.data_ranks)
        pairs.append((dataclasses.replace(case, optimizer=settings), strategy))
    check_parity(subtests, pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts", jobs("ep2", "fsdp2", "dp2,ep2", "fsdp2:zero1,ep2", "ep2,tp2", "pp2,ep2")
)
def test_muon_of_experts(texts: Sequence[str], subtests: pytest.Subtests) -> None:
    """A stack of experts is a matrix each; router and gate of the shared expert are AdamW's."""
    experts = ExpertShape(num_experts=4, top_k=2, ffn=12, shared_ffn=8, has_shared_gate=True)
    shape = dataclasses.replace(LLAMA, num_kv_heads=8, dropout=0.0, experts=experts)
    settings = OptimizerConfig(kind="muon", warmup_steps=0)
    pairs: list[tuple[Case, Strategy]] = []
    for strategy in map(Strategy.parse, texts):
        case = case_of(shape, 2, 13, strategy.data_ranks)
        pairs.append((dataclasses.replace(case, optimizer=settings), strategy))
    (num_ranks,) = {strategy.num_ranks for _, strategy in pairs}
    for verdict in run_ranks(verdicts_on_ranks, num_ranks, pairs)[0]:
        with subtests.test(verdict.strategy):
            assert max(d.error for d in verdict.differences) <= 1e-10, str(verdict)
            quantities = {d.quantity for d in verdict.differences if "experts" in d.name}
            assert "optimizer's momentum_buffer" in quantities


def by_rows(right: Any) -> Any:
    """Orthogonalise each half of the rows, as if it were a matrix."""
    return lambda matrix, *how: torch.cat([right(half, *how) for half in matrix.chunk(2)])


def of_another(right: Any) -> Any:
    """Give each owner's update to another of its matrices of the same shape."""

    def wrong(self: Any, each: Any, wholes: dict[Any, torch.Tensor], dtype: Any) -> Any:
        turned = dict(wholes)
        for a, b in itertools.combinations(wholes, 2):
            if a.shape == b.shape:
                turned[a], turned[b] = turned[b], turned[a]
        return right(self, each, turned, dtype)

    return wrong


def of_half(right: Any) -> Any:
    return lambda how, shape: right(how, (shape[0] // 2, shape[1]))


FAULTS: dict[str, Any] = {
    "Newton-Schulz by rows": (optimizer, "orthogonalize", by_rows),
    "the update of another matrix": (Owners, "scatter", of_another),
    "a rate by the shape of a shard": (optimizer, "rate_ratio", of_half),
}


def verdicts_with_faults(case: Case) -> dict[str, Verdict]:
    strategy = Strategy.parse("fsdp2")
    found: dict[str, Verdict] = {}
    for name, fault in FAULTS.items():
        with planted(fault):
            found[name] = verify_case(case, strategy, Ranks(strategy))
    return found


@pytest.mark.slow
def test_faults_planted_in_muon_are_found() -> None:
    case = case_of(dataclasses.replace(LLAMA, num_kv_heads=8), 1, 4, 2, 1)
    case = dataclasses.replace(case, optimizer=OptimizerConfig(kind="muon", adjust_lr="original"))
    for name, verdict in run_ranks(verdicts_with_faults, 2, case)[0].items():
        assert not verdict.is_equal, name
        assert verdict.first is not None
        assert verdict.first.quantity == "weight", name
        assert verdict.first.name.startswith("blocks."), name


def split_over_ranks(case: Case, strategy: Strategy) -> list[Batch]:
    return [split(batch, 0, strategy.data_ranks, 1)[0] for batch in case.batches]


def to_experts(entry: Entry) -> bool:
    return (entry.axis, entry.op) == ("ep", "all_to_all")


def check_twin(case: Case, strategy: Strategy, entries: list[Entry]) -> None:
    """The bytes that the ledger counted are those that traffic() predicted."""
    microbatches = split(case.batches[-1], 0, strategy.data_ranks, case.accumulation)
    sizes = [tuple(microbatch.tokens_BT.shape) for microbatch in microbatches]
    predicted = Plan(strategy, case.build()).traffic(sizes)
    of_the_loss = {"count", "metrics"}
    # The routing decides how many bytes travel to experts: tests/parallel/test_expert_split.py.
    known = {e for e in entries if e.phase not in of_the_loss and not to_experts(e)}
    assert known == {e for e in predicted if not to_experts(e)}
    # Two numbers of the loss law, 8 bytes each: tokens over every axis of different samples, and
    # the loss over those of other positions too.
    assert {(e.phase, e.axis, e.payload_bytes) for e in entries if e.phase in of_the_loss} == {
        (phase, axis, 8)
        for phase, name in (("count", "data"), ("metrics", "loss"))
        for axis in AXIS_SETS[name]
        if getattr(strategy, axis).degree > 1
    }


@pytest.mark.parametrize(
    "texts", [*jobs("fsdp2:zero1"), *jobs("dp2", "fsdp3", marks=pytest.mark.slow)]
)
def test_gpt2_family_untied(texts: Sequence[str], subtests: pytest.Subtests) -> None:
    strategies = [Strategy.parse(text) for text in texts]
    check_parity(subtests, [(case_of(GPT2, 2, 9, s.data_ranks), s) for s in strategies])


EXPERTS = dataclasses.replace(
    LLAMA,
    vocab_size=68,  # tp splits it
    tied=False,
    experts=ExpertShape(num_experts=4, top_k=2, ffn=12, shared_ffn=16),
)


@pytest.mark.parametrize(
    "texts",
    [
        *jobs("ep2", "fsdp2,ep2"),
        *jobs(
            *("ep4", "dp2,ep2", "fsdp2:zero1,ep2", "fsdp2:zero2,ep2", "cp2,ep2", "cp2:ulysses,ep2"),
            *("pp2,ep2", "ep2,tp2", "ep2,tp2:megatron", "fsdp3,ep2", "fsdp3", "tp2"),
            *("fsdp2,ep2,recompute:full", "fsdp2,ep2,recompute:selective", "ep2,recompute:sqrt"),
            *("fsdp2,cp2,ep2", "dp2,fsdp2,ep2", "pp2,fsdp2,ep2", "fsdp2,ep2,tp2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_experts(texts: Sequence[str], subtests: pytest.Subtests) -> None:
    """fsdp3 splits the 2 experts of a rank along another dimension."""
    strategies = [Strategy.parse(text) for text in texts]
    pairs = [(case_of(EXPERTS, 2, 4 * s.data_ranks + 1, s.data_ranks), s) for s in strategies]
    check_parity(subtests, pairs)


BALANCED = dataclasses.replace(
    EXPERTS,
    num_layers=3,
    experts=dataclasses.replace(
        EXPERTS.experts, num_experts=8, top_k=3, first_dense=1, score="sigmoid", renormalizes=True,
        scaling=2.5, num_groups=4, top_groups=2, group_score="top2", has_bias=True, bias_rate=0.01,
        aux_loss=0.3, z_loss=0.01, capacity=0.9,
    ),
)  # fmt: skip
POOLED = dataclasses.replace(
    EXPERTS, experts=dataclasses.replace(EXPERTS.experts, aux_loss=0.3, pools_layers=True)
)


@pytest.mark.parametrize(
    "texts",
    [
        *jobs("ep2"),
        *jobs(
            *("dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2", "cp2:ulysses", "pp2", "pp2:zb/1"),
            *("cp2", "ep4", "dp2,ep2"),
            *("dp2,recompute:sqrt", "fsdp2,recompute:full", "dp3", "fsdp2,ep2", "pp2,ep2"),
            *("ep2,tp2", "cp2,ep2,recompute:selective", "dp2,pp2:interleaved/2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_limits_and_biases_of_experts(
    texts: Sequence[str], subtests: pytest.Subtests
) -> None:
    """Microbatches are uneven, and in the second step the first data rank has no label at all."""
    pairs: list[tuple[Case, Strategy]] = []
    for strategy in map(Strategy.parse, texts):
        of = BALANCED if strategy.pp.degree == 1 else dataclasses.replace(BALANCED, num_layers=5)
        # Uneven microbatches, and one microbatch, whose own forward counts.
        for shape, accumulation in ((of, 3), (POOLED, 1)):
            ranks = strategy.data_ranks
            case = case_of(shape, accumulation, accumulation * ranks + 1, ranks)
            pairs.append((case, strategy))
    check_parity(subtests, pairs)


# Four blocks: sqrt is segments of two, and the last segment of every/3 is short.
@pytest.mark.parametrize(
    ("llama", "gpt2"),
    [
        by_hand(("fsdp2,recompute:selective",), ()),
        by_hand(("dp2,recompute:sqrt",), ()),
        by_hand(("dp2,recompute:full", "fsdp2,recompute:every/3"), ()),
        by_hand((), ("dp2,recompute:selective", "fsdp2,recompute:full")),
        by_hand(("dp2,fsdp2:zero2,recompute:sqrt",), ()),
    ],
)
def test_recomputation(
    llama: Sequence[str], gpt2: Sequence[str], subtests: pytest.Subtests
) -> None:
    pairs: list[tuple[Case, Strategy]] = []
    for shape, texts in ((LLAMA, llama), (GPT2, gpt2)):
        deep = dataclasses.replace(shape, num_layers=4)
        for strategy in map(Strategy.parse, texts):
            pairs.append((case_of(deep, 2, 9, strategy.data_ranks), strategy))
    check_parity(subtests, pairs)


TENSOR = ("tp2", "tp4", "tp4:2d", "tp8:2.5d/2", "tp8:3d")
WHOLE = "tp2:megatron"
"""Every kind of tp. 17 positions are uneven over all degrees, and so are 7 and 6 rows over most."""


def tensor_pairs(
    shape: ModelShape, texts: Sequence[str], num_layers: int | None = None
) -> list[tuple[Case, Strategy]]:
    pairs: list[tuple[Case, Strategy]] = []
    for strategy in map(Strategy.parse, texts):
        layers = num_layers or (2 if strategy.num_ranks <= 4 else 1)
        deep = dataclasses.replace(shape, num_layers=layers)
        pairs.append((case_of(deep, 2, 13, strategy.data_ranks), strategy))
    return pairs


@pytest.mark.parametrize(
    "texts",
    [
        *jobs(WHOLE, "tp4:2d"),
        *jobs(
            *(
                "tp2",
                "tp8:2.5d/2",
                "tp8:3d",
                "tp4",
                "fsdp2,tp2",
                "dp2,tp2",
                f"fsdp2,{WHOLE}",
                "fsdp2,tp4:2d",
                "dp2,tp4",
                "fsdp2,tp4",
                "dp2,tp4:2d",
            ),
            *(outer + tensor for outer in ("dp2,", "fsdp2,") for tensor in TENSOR[3:]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tensor_layouts(texts: Sequence[str], subtests: pytest.Subtests) -> None:
    check_parity(subtests, tensor_pairs(LLAMA, texts))


@pytest.mark.parametrize(
    "texts",
    jobs("tp2", WHOLE, "tp4", *TENSOR[2:], marks=pytest.mark.slow),
)
def test_tensor_layouts_of_the_gpt2_family(texts: Sequence[str], subtests: pytest.Subtests) -> None:
    """Norms with a mean, biases, a table of positions, an output projection of its own."""
    check_parity(subtests, tensor_pairs(GPT2, texts))


@pytest.mark.slow
def test_shards_of_tp_that_fsdp_splits_unevenly(subtests: pytest.Subtests) -> None:
    shape = dataclasses.replace(LLAMA, vocab_size=68)
    check_parity(subtests, tensor_pairs(shape, ["fsdp3,tp2"]))


@pytest.mark.slow
@pytest.mark.parametrize("texts", jobs("tp2", WHOLE, "tp4:2d"))
def test_tensor_layouts_with_norms_of_queries_and_keys(
    texts: Sequence[str], subtests: pytest.Subtests
) -> None:
    shape = dataclasses.replace(LLAMA, qk_norm=True)
    check_parity(subtests, tensor_pairs(shape, texts, num_layers=1))


@pytest.mark.parametrize(
    "texts",
    [
        *jobs("fsdp2:zero1,tp2", marks=pytest.mark.slow),
        *jobs("dp2,fsdp2,tp2", "fsdp2:zero2,tp4:2d", marks=pytest.mark.slow),
    ],
)
def test_tensor_layouts_beside_each_stage_of_sharding(
    texts: Sequence[str], subtests: pytest.Subtests
) -> None:
    check_parity(subtests, tensor_pairs(LLAMA, texts))


@pytest.mark.parametrize(
    ("texts", "num_layers"),
    [
        by_hand(("tp2,recompute:full",), 2),
        by_hand((f"{WHOLE},recompute:full",), 2),
        by_hand(("fsdp2,tp2,recompute:sqrt",), 4),
        by_hand(("tp2,recompute:every/3",), 4),  # of which the last segment is short
        by_hand(("tp4:2d,recompute:selective",), 1),
        by_hand(("tp8:2.5d/2,recompute:full", "tp8:3d,recompute:selective"), 1),
    ],
)
def test_tensor_layouts_beside_recomputation(
    texts: Sequence[str], num_layers: int, subtests: pytest.Subtests
) -> None:
    check_parity(subtests, tensor_pairs(LLAMA, texts, num_layers))


CONTEXT = ("cp2", "cp2:ulysses")
"""Both kinds of cp. 17 positions are padded to 18 and to 20, and 4 heads of keys repeated for 8."""


@pytest.mark.parametrize(
    "texts",
    [
        *jobs("cp2:ulysses"),
        *jobs("cp2", "cp3", "dp2,cp2", "cp2,tp2", "fsdp2,cp2:ulysses", marks=pytest.mark.slow),
        *jobs("cp4", "cp4:ulysses", marks=pytest.mark.slow),
        *jobs("fsdp2,cp2,tp2", "fsdp2:zero1,cp2,tp2:megatron", marks=pytest.mark.slow),
        *jobs("cp8:ulysses", "cp2,tp4:2d", "cp2:ulysses,tp4:2d", marks=pytest.mark.slow),
    ],
)
def test_context_kinds(texts: Sequence[str], subtests: pytest.Subtests) -> None:
    check_parity(subtests, tensor_pairs(LLAMA, texts))


@pytest.mark.slow
@pytest.mark.parametrize("texts", jobs(*CONTEXT, "cp2:ulysses,tp2", "fsdp2:zero1,cp2"))
def test_context_kinds_of_the_gpt2_family(texts: Sequence[str], subtests: pytest.Subtests) -> None:
    """A table of positions, of which padding asks for none beyond the row."""
    check_parity(subtests, tensor_pairs(GPT2, texts))


@pytest.mark.parametrize(
    ("texts", "num_layers"),
    [
        (["cp2,recompute:full"], 1),
        by_hand(["cp2,recompute:full", "cp2:ulysses,recompute:selective"], 2),
        by_hand(["cp2,recompute:selective", "cp2:ulysses,recompute:full"], 2),
        by_hand(["cp2,tp2,recompute:full", "cp2:ulysses,tp2,recompute:selective"], 2),
    ],
)
def test_context_kinds_beside_recomputation(
    texts: Sequence[str], num_layers: int, subtests: pytest.Subtests
) -> None:
    check_parity(subtests, tensor_pairs(LLAMA, texts, num_layers))


@pytest.mark.parametrize(
    "texts",
    [
        *jobs(
            "cp2",
            "tp2",
            "fsdp2,recompute:full",
            "cp2:ulysses",
            "tp4:2d",
            f"{WHOLE},recompute:full",
            "tp2,recompute:selective",
            "cp2,tp2",
            "tp4",
            *TENSOR[3:],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_windows_norms_after_branches_and_of_projections(
    texts: Sequence[str], subtests: pytest.Subtests
) -> None:
    check_parity(subtests, tensor_pairs(WINDOWED, texts, num_layers=2))


def initial_weights() -> dict[str, bytes]:
    model = Decoder(LLAMA)
    model.initialize(SEED)
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


def test_initial_weights_are_bit_equal_for_any_number_of_ranks() -> None:
    (alone,) = run_ranks(initial_weights, 1, threads=1)
    for num_ranks in (2, 4):
        assert all(weights == alone for weights in run_ranks(initial_weights, num_ranks, threads=1))


class Regression(nn.Module):
    """A user's own module and objective."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class SquaredError:
    def loss_sum(
        self, model: nn.Module, microbatch: dict[str, torch.Tensor], step: int
    ) -> torch.Tensor:
        return (model(microbatch["x"]) - microbatch["y"]).square().sum()

    def num_valid(self, microbatch: dict[str, torch.Tensor]) -> int:
        return len(microbatch["x"])


class MeanOfMeans(SquaredError):
    """The classic mistake: each microbatch averages, whatever it weighs in the whole."""

    def loss_sum(
        self, model: nn.Module, microbatch: dict[str, torch.Tensor], step: int
    ) -> torch.Tensor:
        return super().loss_sum(model, microbatch, step) / len(microbatch["x"])


def regression_batches() -> list[dict[str, torch.Tensor]]:
    x = torch.linspace(-1, 1, 2 * 7 * 5, dtype=torch.float64).view(2, 7, 5)
    return [{"x": x[step], "y": x[step].sum(-1, keepdim=True).sin()} for step in range(2)]


@pytest.mark.parametrize(
    "text", ["fsdp3", by_hand("dp3"), by_hand("fsdp2:zero2"), by_hand("dp2,fsdp3")]
)
def test_a_users_own_module(text: str) -> None:
    """It has no blocks, and biases of fewer rows than there are ranks."""
    assert verify(Regression, regression_batches(), text, SquaredError()).is_equal


class Scaled(Regression):
    """Has a parameter without dimensions, whose moments have none either."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.net(x)


def test_a_parameter_without_dimensions_is_compared() -> None:
    verdict = verify(Scaled, regression_batches(), "dp2", SquaredError())
    assert verdict.is_equal, str(verdict)
    compared = {each.quantity for each in verdict.differences if each.name == "scale"}
    assert compared >= {"gradient", "first moment", "second moment", "weight"}


def test_a_wrong_loss_is_found_and_named() -> None:
    verdict = verify(Regression, regression_batches(), "dp2", MeanOfMeans())
    assert not verdict.is_equal
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.quantity) == (0, "loss")
    assert "dp2 differs from one process, first at step 0, the loss" in str(verdict)


class DrawsPerRank(Regression):
    """A rank that starts from weights of its own is made equal; noise of its own is found."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = torch.distributed.get_rank()
        return self.net(x) * (1 + 1e-6 * rank)


@pytest.mark.parametrize("text", ["dp2", "fsdp2"])
def test_a_rank_that_computes_something_else_is_found(text: str) -> None:
    verdict = verify(DrawsPerRank, regression_batches(), text, SquaredError())
    assert verdict.first is not None


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[torch.Tensor]


def test_batches_are_cast_and_keep_their_form() -> None:
    batches = [{"x": batch["x"].float(), "y": batch["y"].float()} for batch in regression_batches()]
    assert verify(Regression, batches, "dp2", SquaredError()).is_equal
    (cut,) = split(Pair(torch.ones(4, 2), [torch.zeros(4)]), 1, 2, 1)
    assert cut.x.shape == (2, 2) and cut.y[0].shape == (2,)


@pytest.mark.parametrize(
    "batch, words",
    [
        ({"name": ["a", "b"]}, "a batch is a dict without a tensor"),
        ({"x": torch.ones(4), "y": torch.ones(5)}, "have \\[4, 5\\] rows"),
    ],
)
def test_batches_that_cannot_be_split_are_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        verify(Regression, [batch], "dp2", SquaredError())


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="7 rows, which cannot be cut into 3 microbatches on each of 4"
    ):
        verify(Regression, regression_batches(), "dp4", SquaredError(), accumulation=3)
