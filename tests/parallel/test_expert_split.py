"""Expert parallelism: values and gradients of one process, and the bytes that a step sends."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from marks import by_hand
from nccl_trace import traced
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.row_counts import noted
from phalanx.comm.together import gather_objects
from phalanx.config import OptimizerConfig
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.experts import MoE
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.expert_split import ExpertSplit, apply
from phalanx.parallel.plan import Plan, plan_decoder
from phalanx.strategy import Strategy
from phalanx.verify.batches import decoder_batches
from phalanx.verify.cases import decoder_case
from phalanx.verify.harness import verify_case
from phalanx.verify.locate import positions_of
from phalanx.verify.routing import RouteRecorder, joined

EXPERTS = ExpertShape(num_experts=8, top_k=3, ffn=12, shared_ffn=8)
BALANCED = dataclasses.replace(EXPERTS, aux_loss=0.1, z_loss=0.01)
LIMITED = dataclasses.replace(EXPERTS, shared_ffn=0, capacity=1.0)
SHAPE = ModelShape(
    vocab_size=48, num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=16, experts=EXPERTS,
)  # fmt: skip
DEVICE = torch.device("cpu")  # named, so that the rules of NCCL take its tensors for a GPU's


def branch(dtype: torch.dtype, chosen: tuple[int, ...] = (), ffn: int = 12) -> MoE:
    """Return a branch with experts; with `chosen`, tokens select no others."""
    moe = MoE(SHAPE, dataclasses.replace(EXPERTS, ffn=ffn), 0).to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        if chosen:
            moe.router.bias = torch.full((8,), -1e3).index_fill_(0, torch.tensor(chosen), 1e3)
    return moe.to(DEVICE)


def tokens(num_ranks: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return the tokens [1, T, D] of each rank."""
    generator = torch.Generator().manual_seed(num_ranks)
    return [
        torch.randn(1, size, SHAPE.hidden, generator=generator, device=DEVICE).to(dtype)
        for size in sizes
    ]


def compute(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input, from a loss that weighs each element."""
    x = x.clone().requires_grad_()
    y = moe(x)
    y.backward((y.detach() * 0.25).cos())
    assert x.grad is not None
    return y.detach(), x.grad


def equal_to_one_process(
    axes: dict[str, int], sizes: tuple[int, ...], dtype: torch.dtype, chosen: tuple[int, ...]
) -> None:
    comm = Ranks(axes)
    own, number = branch(dtype, chosen), comm.coord("job")
    apply(own, comm)
    parts = tokens(len(sizes), sizes, dtype)
    found = compute(own, parts[number])
    whole = branch(dtype, chosen)
    expected = [each.split(sizes, 1)[number] for each in compute(whole, torch.cat(parts, 1))]
    close = (
        {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **close)
    for (name, part), full in zip(own.named_parameters(), whole.parameters(), strict=True):
        assert full.grad is not None and part.grad is not None, name
        is_expert = name.startswith("experts.")
        grad = comm.all_reduce(local_shard(part.grad).clone(), "dp" if is_expert else "job")
        right = full.grad.chunk(axes["ep"])[comm.coord("ep")] if is_expert else full.grad
        torch.testing.assert_close(grad, right, **close, msg=lambda text, name=name: name + text)
        if chosen and is_expert:
            first = comm.coord("ep") * len(right)
            idle = [e for e in range(len(right)) if first + e not in chosen]
            assert not grad[idle].any() and (not right[idle].any())


@pytest.mark.parametrize(
    "axes, sizes, dtype, chosen",
    [
        ({"ep": 2}, (5, 0), torch.float64, ()),
        ({"dp": 2, "ep": 2}, (5, 1, 0, 9), torch.float64, ()),
        by_hand({"ep": 2}, (5, 7), torch.float32, ()),
        by_hand({"ep": 2}, (50, 7), torch.bfloat16, ()),
        by_hand({"ep": 4}, (5, 1, 0, 9), torch.float64, ()),
        by_hand({"ep": 4}, (5, 1, 7, 9), torch.float64, (0, 1, 5)),  # ranks 1 and 3 are idle
        by_hand({"ep": 8}, (5, 1, 0, 9, 2, 2, 2, 2), torch.float64, ()),
    ],
)
def test_one_branch_equals_one_process_by_the_rules_of_nccl(
    axes: dict[str, int], sizes: tuple[int, ...], dtype: torch.dtype, chosen: tuple[int, ...]
) -> None:
    run_ranks(traced, len(sizes), equal_to_one_process, axes, sizes, dtype, chosen, threads=1)


def test_an_idle_rank_takes_part_and_its_gradients_are_zeros() -> None:
    run_ranks(equal_to_one_process, 2, {"ep": 2}, (5, 3), torch.float64, (0, 1, 3), threads=1)


def rows_of_experts(num_ranks: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return rows, sorted by expert, and their counts, for each rank."""
    generator = torch.Generator().manual_seed(num_ranks)
    counts = torch.randint(0, 9, (num_ranks, EXPERTS.num_experts), generator=generator)
    rows = torch.randn(int(counts.sum()), SHAPE.hidden, generator=generator).to(dtype)
    return list(zip(rows.split(counts.sum(1).tolist()), counts, strict=True))


def results_have_the_bits_of_one_process(dtype: torch.dtype) -> None:
    comm = Ranks({"ep": dist.get_world_size()})
    # Rows of 64 bytes and multiples: MKL's products of other rows depend on their addresses.
    own, whole = (branch(dtype, ffn=32).experts for _ in range(2))
    coord = comm.coord("ep")
    parts = rows_of_experts(comm.size("ep"), dtype)
    # One process has the same rows of an expert in the same order: by the rank of their tokens.
    pieces = [rows.split(counts.tolist()) for rows, counts in parts]
    sorted_rows = [piece[expert] for expert in range(EXPERTS.num_experts) for piece in pieces]
    right = whole(torch.cat(sorted_rows), sum(counts for _, counts in parts)).split(
        [len(piece) for piece in sorted_rows]
    )
    apply(own, comm)
    rows, counts = parts[coord]
    found = own(rows, own.start(rows, counts))
    assert torch.equal(found, torch.cat(right[coord :: comm.size("ep")]))


@pytest.mark.parametrize("num_ranks", [2, by_hand(4), by_hand(8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_result_to_the_bit_wherever_its_expert_is(
    num_ranks: int, dtype: torch.dtype
) -> None:
    run_ranks(results_have_the_bits_of_one_process, num_ranks, dtype, threads=1)


EVEN = dataclasses.replace(
    SHAPE, hidden=64, head_dim=16, experts=dataclasses.replace(EXPERTS, ffn=32, shared_ffn=32)
)
"""Rows of 64 bytes and multiples."""

Routing = tuple[dict[str, Tensor], float]


def routed(texts: Sequence[str], *dtypes: torch.dtype) -> list[Routing]:
    """Return the experts of each token of a batch, by router, and its loss; each in all types.

    Each microbatch has the same two rows, whatever the number of ranks.
    """
    found: list[Routing] = []
    for dtype, text in itertools.product(dtypes, texts):
        strategy = Strategy.parse(text)
        comm, model = Ranks(strategy), Decoder(EVEN)
        model.initialize(5)
        runner = Plan(strategy, model.to(dtype)).build(comm)
        routes = RouteRecorder(model, runner, positions_of(strategy, comm))
        routes.is_on = True
        rows = torch.arange(16).chunk(comm.size("data"))[comm.coord("data")].split(2)
        ids = torch.randint(48, (16, 14), generator=torch.Generator().manual_seed(3))
        loss = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for runner.microbatch, rows_B in enumerate(rows):
                loss += model(ids[rows_B, :-1], ids[rows_B, 1:]).double()
        every = gather_objects(routes.take(rows))
        found.append((joined(every, 0), float(comm.all_reduce(loss, "loss"))))
    return found


@pytest.mark.parametrize(
    "texts",
    [
        ("ep2", "dp2"),
        by_hand(("ep4", "dp2,ep2", "fsdp2,ep2", "fsdp4")),
        by_hand(("ep8", "dp2,ep4", "fsdp4,ep2", "dp2,fsdp2,ep2")),
    ],
)
def test_the_same_tokens_go_to_the_same_experts_with_the_same_loss_to_the_bit(
    texts: tuple[str, ...],
) -> None:
    types, num_ranks = (torch.float32, torch.bfloat16), Strategy.parse(texts[0]).num_ranks
    alone = run_ranks(routed, 1, ["dp1"], *types, threads=1)[0]
    found = run_ranks(routed, num_ranks, texts, *types, threads=1)[0]
    for n, (experts, loss) in enumerate(found):
        right, expected = alone[n // len(texts)]
        assert_same_experts(experts, right, texts[n % len(texts)])
        assert loss == expected, texts[n % len(texts)]


@pytest.mark.parametrize(
    "texts",
    [
        ("tp2", "cp2"),
        by_hand(("ep2,tp2", "cp2,ep2", "cp2:ulysses,ep2", "ep2,tp2:megatron")),
        by_hand(("ep4,tp2", "cp2,ep4", "fsdp2,ep2,tp2", "cp2,ep2,tp2")),
    ],
)
def test_tokens_go_to_the_same_experts_beside_other_axes(texts: tuple[str, ...]) -> None:
    """There sums have another order, and a loss other bits."""
    ((right, expected),) = run_ranks(routed, 1, ["dp1"], torch.float32, threads=1)[0]
    num_ranks = Strategy.parse(texts[0]).num_ranks
    found = run_ranks(routed, num_ranks, texts, torch.float32, threads=1)[0]
    for text, (experts, loss) in zip(texts, found, strict=True):
        assert_same_experts(experts, right, text)
        assert loss == pytest.approx(expected, rel=1e-5), text


def assert_same_experts(found: dict[str, Tensor], right: dict[str, Tensor], text: str) -> None:
    assert found.keys() == right.keys()
    for name, experts_BTk in right.items():
        assert experts_BTk.shape == (16, 13, EXPERTS.top_k)
        assert len(experts_BTk.unique()) == EXPERTS.num_experts
        ours = found[name][:, :13]  # cp pads rows
        assert torch.equal(ours.sort(-1).values, experts_BTk.sort(-1).values), (text, name)


def counted(text: str, experts: ExpertShape) -> tuple[list[Entry], list[Entry]]:
    """Return what the ledger counts over ep in two microbatches, and what follows from counts."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    plan = plan_decoder(strategy, dataclasses.replace(SHAPE, experts=experts), torch.float64)
    split = next(each for each in plan._splits if isinstance(each, ExpertSplit))
    model = plan.model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(comm.coord("data"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    plan.apply(comm)
    with noted() as seen, Ledger(comm) as ledger:
        for length in (11, 6):
            ids = torch.randint(0, 48, (2, length + 1), generator=generator)
            with ledger.phase("forward"):
                loss = model(ids[:, :-1], ids[:, 1:])
            with ledger.phase("backward"):
                loss.backward()
    entries = [entry for entry in ledger.entries() if entry.axis == "ep"]
    return entries, split.traffic_of(seen, comm.coord("ep"))


@pytest.mark.parametrize(
    "text, experts",
    [
        ("ep2", EXPERTS),
        by_hand("ep4", EXPERTS),
        by_hand("ep4", LIMITED),
        by_hand("dp2,ep2,recompute:full", EXPERTS),
        by_hand("ep2,recompute:selective", LIMITED),
    ],
)
def test_a_step_sends_what_follows_from_its_counts(text: str, experts: ExpertShape) -> None:
    strategy = Strategy.parse(text)
    plan = plan_decoder(strategy, dataclasses.replace(SHAPE, experts=experts), torch.float64)
    split = next(each for each in plan._splits if isinstance(each, ExpertSplit))
    low, high = split.bounds([(2, 11), (2, 6)])
    for found, right in run_ranks(counted, strategy.num_ranks, text, experts, threads=1):
        assert sorted(found, key=str) == sorted(right, key=str)
        for one, least, most in zip(right, low, high, strict=True):
            assert dataclasses.replace(one, payload_bytes=0, sent_bytes=0) == dataclasses.replace(
                least, payload_bytes=0, sent_bytes=0
            )
            assert least.sent_bytes <= one.sent_bytes <= most.sent_bytes
            assert least.payload_bytes <= one.payload_bytes <= most.payload_bytes


def test_the_plan_expects_even_routing() -> None:
    """Two ranks, 34 tokens a rank, 3 experts of 8 each: of 102 rows of 128 bytes half stay."""
    plan = plan_decoder(Strategy.parse("ep2"), SHAPE, torch.float64)
    entries = [entry for entry in plan.traffic([(2, 11), (2, 6)]) if entry.axis == "ep"]
    exchanged = [entry for entry in entries if entry.op in ("all_gather", "all_to_all")]
    rows = 2 * 2 * 102 * 128  # layers, there and back
    assert exchanged == [
        Entry("forward", "ep", "all_gather", 4, 4 * 128, 4 * 64.0),
        Entry("forward", "ep", "all_to_all", 8, rows, rows / 2),
        Entry("backward", "ep", "all_to_all", 8, rows, rows / 2),
    ]


@pytest.mark.parametrize(
    "text, experts, words",
    [
        ("ep2", None, "ep2: ep splits the experts of .* without experts; the nearest is dp2"),
        ("ep3", EXPERTS, "ep3: the model has 8 experts, .* multiple of 3; the nearest is ep2"),
        ("ep2,tp4:2d", EXPERTS, "tp4:2d: .*; the nearest is tp4"),
        ("tp4:2d", EXPERTS, "tp4:2d: .*; the nearest is tp4"),
    ],
)
def test_what_ep_cannot_split_is_refused(
    text: str, experts: ExpertShape | None, words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        plan_decoder(Strategy.parse(text), dataclasses.replace(SHAPE, experts=experts))


def test_a_stage_without_experts_is_planned_and_another_is_refused_by_its_plan() -> None:
    """The plan of the first stage, which has only MLPs, decides for all ranks."""
    shape = dataclasses.replace(SHAPE, num_layers=4)
    late = dataclasses.replace(shape, experts=dataclasses.replace(EXPERTS, first_dense=2))
    plan = plan_decoder(Strategy.parse("pp2,ep2"), late)
    sizes = [(1, 8)] * 2
    sent = [sum(e.op == "all_to_all" for e in plan.for_pp_rank(at).traffic(sizes)) for at in (0, 1)]
    assert sent[0] == 0 and sent[1] > 0
    with pytest.raises(StrategyError, match=r"8 experts, .* multiple of 3; the nearest is ep2"):
        plan_decoder(Strategy.parse("pp2,ep3"), late)


def verified(text: str, experts: ExpertShape, num_rows: int, accumulation: int) -> str:
    """Return why a strategy differs from plain PyTorch in one process; empty if it does not."""
    shape, strategy = dataclasses.replace(SHAPE, experts=experts), Strategy.parse(text)
    if strategy.pp.degree > 1:
        shape = dataclasses.replace(shape, num_layers=4)
    batches = decoder_batches(shape, 2, num_rows, 11, 1)
    case = decoder_case(shape, batches, 0, OptimizerConfig())
    case = dataclasses.replace(case, accumulation=accumulation)
    verdict = verify_case(case, strategy, Ranks(strategy))
    return "" if verdict.is_equal else str(verdict)


@pytest.mark.parametrize(
    "text, experts, num_rows, accumulation",
    [
        ("ep2,tp2", BALANCED, 4, 1),
        by_hand("ep2", BALANCED, 7, 3),  # odd microbatches, and more of them than rows in some
        by_hand("fsdp2,ep2", EXPERTS, 8, 1),
        *(
            by_hand(text, experts, 9, 3)
            for experts in (EXPERTS, BALANCED, LIMITED)
            for text in (
                *("ep4", "dp2,ep2", "fsdp2:zero1,ep2", "fsdp2:zero2,ep2", "fsdp2,ep2"),
                *("ep2,tp2", "ep2,tp2:megatron", "cp2,ep2", "cp2:ulysses,ep2", "pp2,ep2"),
                *("pp2:interleaved/2,ep2", "pp2:zb/1,ep2", "fsdp2,ep2,tp2", "fsdp2,cp2,ep2"),
                *("ep2,recompute:full", "ep2,recompute:sqrt", "ep2,tp2,recompute:selective"),
            )
        ),
        by_hand("ep4", EXPERTS, 3, 1),  # a rank has no row at all
        by_hand("dp2,ep4", BALANCED, 8, 2),
    ],
)
def test_a_decoder_equals_plain_pytorch_by_the_rules_of_nccl(
    text: str, experts: ExpertShape, num_rows: int, accumulation: int
) -> None:
    args = verified, text, experts, num_rows, accumulation
    assert set(run_ranks(traced, Strategy.parse(text).num_ranks, *args, threads=1)) == {""}
