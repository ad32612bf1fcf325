"""Pipelines of any chain of modules: nn.Sequential, transformers' models, a chain of one's own."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hub import NUM_WORDS, OPTIONS, small
from marks import by_hand
from phalanx.comm import dry_run
from phalanx.comm.comm import Ranks
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.parallel.pipeline.links import chain_by, links_of
from phalanx.parallel.pipeline.modules import ModuleStages
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import skeleton_of
from phalanx.strategy import Strategy
from phalanx.verify.harness import verify_on_ranks
from phalanx.verify.record import Case
from phalanx.verify.verdict import Verdict

transformers = pytest.importorskip("transformers")

NUM_ROWS, LENGTH = 9, 7


def mlp() -> nn.Module:
    torch.manual_seed(0)
    wide = [nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 12)]
    return nn.Sequential(
        *wide, nn.LayerNorm(12), nn.Sequential(nn.Tanh(), nn.Linear(12, NUM_WORDS))
    )


class Convolutions(nn.Module):
    """Names its chain, since it has no list; its pooling and its ReLU run in every stage."""

    chain = ("first", ["second", "norm"], "last")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.relu = nn.ReLU()
        self.last = nn.Linear(6, NUM_WORDS)  # registered before what runs before it
        self.first = nn.Conv1d(12, 8, 3, padding=1)
        self.second = nn.Conv1d(8, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x[..., None]))
        x = self.relu(self.norm(self.second(x)))
        return self.last(self.pool(x).flatten(1))


def in_place() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 9), nn.ReLU(inplace=True),
        nn.Linear(9, NUM_WORDS),
    )  # fmt: skip


def normalised() -> nn.Module:
    """Its batch normalisation has statistics of its own, whatever mode the model is in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, NUM_WORDS))
    model[1].eval()
    return model


class Turned(nn.Linear):
    """Ends in a tensor of seven dimensions that does not lie in their order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), 1, 2, 1, 3, 1, 2).transpose(2, 4)


def turned() -> nn.Module:
    torch.manual_seed(0)
    last = nn.Sequential(nn.Flatten(), nn.Linear(12, NUM_WORDS))
    return nn.Sequential(Turned(12, 12), nn.Tanh(), last)


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3)]
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, NUM_WORDS))
    return nn.Sequential(*convolutions, last).to(memory_format=torch.channels_last)


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Registered(nn.Module):
    """Registers its layers again, in two parts that it runs, as a tutorial of PyTorch does."""

    def __init__(self, chain: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3))
        self.layer2 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh())
        self.last = nn.Linear(16, NUM_WORDS)
        self.part1 = nn.Sequential(self.conv, self.norm, self.layer1)
        self.part2 = nn.Sequential(self.layer2, nn.AdaptiveAvgPool2d(2))
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part2(self.part1(x)).flatten(1))


PARTS = ("part1", "part2", "last")
LAYERS = (("conv", "norm"), "layer1", "layer2", "last")


def with_detached() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), Detached(), nn.Linear(12, 12), nn.Linear(12, NUM_WORDS))


def frozen_in_front() -> nn.Module:
    """Nothing is trained before the stage that stops gradients."""
    model = with_detached()
    model[0].requires_grad_(False)
    return model


def frozen_behind() -> nn.Module:
    """The last rank trains nothing, and sends the gradient of its input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, NUM_WORDS))
    model[1:].requires_grad_(False)
    return model


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Tabled(nn.Module):
    """The first link and the last share a table, as a tied decoder's do."""

    def __init__(self, block: type[nn.Linear] = Residual) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(NUM_WORDS, 12)
        self.scale = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(block(12, 12) for _ in range(3))
        self.head = nn.Linear(12, NUM_WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.scale(self.words(input_ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trimmed(Tabled):
    """Leaves out the positions that are padding in all rows of a microbatch."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1)
        logits = super().forward(input_ids[:, : int(lengths.max())])
        return logits[torch.arange(len(logits)), lengths - 1]


class Recomputed(Tabled):
    """Recomputes each block, on what is computed between them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.scale(self.words(input_ids))
        for block in self.blocks:
            x = checkpoint(block, x * 0.9, use_reentrant=False)
        return self.head(x)


class RecomputedTogether(Tabled):
    """Recomputes blocks in one."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = checkpoint(self.run, self.words(input_ids), use_reentrant=False)
        return self.head(x)

    def run(self, x: Tensor) -> Tensor:
        x = self.scale(x)
        for block in self.blocks:
            x = block(x)
        return x


class Around(Tabled):
    """Adds what goes past a block to what it makes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.scale(self.words(input_ids))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Past(nn.Sequential):
    """Its last layer gets what the first has made, which went past two others."""

    def forward(self, x: Tensor) -> Tensor:
        first = self[0](x)
        return self[3](self[2](self[1](first)) + first)


def past() -> nn.Module:
    torch.manual_seed(0)
    return Past(*(nn.Linear(12, 12) for _ in range(4)))


def hub(family: str, task: str = "CausalLM", **options: Any) -> nn.Module:
    """Return a small model of transformers, of three blocks."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    if "layer_types" in OPTIONS.get(family, {}):
        options["layer_types"] = types
    return small(family, task, num_hidden_layers=3, **options)


@dataclasses.dataclass(frozen=True)
class Objective:
    """Cross-entropy of what a model makes of some arguments, which may be an output of a class."""

    inputs: tuple[str, ...]

    def loss_sum(self, model: nn.Module, microbatch: dict, step: int) -> Tensor:
        if len(self.inputs) == 1:
            output = model(microbatch[self.inputs[0]])
        else:
            output = model(**{name: microbatch[name] for name in self.inputs})
        logits = getattr(output, "logits", output)
        labels = microbatch["labels"] if logits.ndim == 3 else microbatch["labels"][:, 0]
        labels = labels % logits.shape[-1]
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    def num_valid(self, microbatch: dict) -> int:
        return microbatch["labels"].numel()


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    places = torch.arange(LENGTH)[None]
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        lengths = torch.randint(3, LENGTH + 1, (NUM_ROWS, 1), generator=draw)
        words = torch.randint(0, NUM_WORDS, (NUM_ROWS, LENGTH + 1), generator=draw)
        found.append(
            {
                "features": torch.randn(NUM_ROWS, 12, generator=draw, dtype=torch.float64),
                "input_ids": words[:, :-1],
                "attention_mask": (places < lengths).long(),
                "pixel_values": torch.randn(
                    NUM_ROWS, 3, 12, 12, generator=draw, dtype=torch.float64
                ),
                "labels": words[:, 1:],
            }
        )
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "sequential": (mlp, ("features",)),
    "chain": (Convolutions, ("features",)),
    "past": (past, ("features",)),
    "in place": (in_place, ("features",)),
    "normalised": (normalised, ("features",)),
    "tabled": (Tabled, ("input_ids",)),
    "recomputed": (Recomputed, ("input_ids",)),
    "around": (Around, ("input_ids",)),
    "trimmed": (Trimmed, ("input_ids", "attention_mask")),
    "turned": (turned, ("features",)),
    "channels last": (channels_last, ("pixel_values",)),
    "registered, parts": (functools.partial(Registered, PARTS), ("pixel_values",)),
    "registered, layers": (functools.partial(Registered, LAYERS), ("pixel_values",)),
    "frozen in front": (frozen_in_front, ("features",)),
    "frozen behind": (frozen_behind, ("features",)),
    "llama": (
        functools.partial(hub, "llama"),
        ("input_ids", "attention_mask"),
    ),
    "qwen2, tied": (
        functools.partial(hub, "qwen2", tie_word_embeddings=True),
        ("input_ids",),
    ),
    "gpt2": (functools.partial(hub, "gpt2"), ("input_ids", "attention_mask")),
    "bert": (
        functools.partial(hub, "bert", "SequenceClassification"),
        ("input_ids", "attention_mask"),
    ),
    **{
        family: (functools.partial(hub, family), ("input_ids", "attention_mask"))
        for family in ("mistral", "qwen3", "olmo2", "gemma2", "gemma3_text", "phi3")
    },
    "gemma2, classes": (
        functools.partial(hub, "gemma2", "SequenceClassification"),
        ("input_ids", "attention_mask"),
    ),
    "vit": (functools.partial(hub, "vit", "ImageClassification"), ("pixel_values",)),
}
FAMILIES = ("mistral", "qwen3", "olmo2", "gemma2", "gemma3_text", "phi3", "vit")
MORE = (*FAMILIES, "gemma2, classes")

# Where what goes past a layer stays in one stage, it is no obstacle.
JOBS: dict[str, Sequence[str]] = {
    "pp2": [
        *("chain", "in place", "normalised", "tabled", "around", "trimmed", "turned"),
        *("channels last", "registered, parts", "bert"),
    ],
    "pp2,cut:3+2": ["in place"],
    "pp2:interleaved/2": ["recomputed", "qwen2, tied", "frozen in front"],
    "pp2:zbv": ["gpt2"],
    "pp2,cut:1+3": ["past", "frozen in front"],
    "pp2,cut:1+2": ["frozen behind"],
}
OTHERS: dict[str, Sequence[str]] = {
    "pp2": [
        "sequential",
        "recomputed",
        "registered, layers",
        "llama",
        "qwen2, tied",
        "gpt2",
        *MORE,
    ],
    "pp2,cut:1+4": ["in place"],
    "pp2,cut:3+2": ["around"],
    "pp2:zb/1": ["turned", "sequential"],
    "pp2:zb/2": ["frozen in front"],
    "pp2,cut:3+1": ["past"],
    "pp2:gpipe,cut:1+4": ["tabled", "sequential", "gpt2"],
    "pp2:interleaved/2": ["sequential", "llama", "registered, layers"],
    "pp2:zbv": ["tabled"],
    "pp2,recompute:full": ["tabled", "llama"],
}


def case_of(name: str, strategy: Strategy) -> Case:
    build, inputs = MODELS[name]
    return Case(build, Objective(inputs), batches(), 2 * strategy.pp.degree)


def verdicts(jobs: dict[str, Sequence[str]]) -> list[tuple[str, Verdict]]:
    found: list[tuple[str, Verdict]] = []
    for text, names in jobs.items():
        strategy = Strategy.parse(text)
        cases = {name: case_of(name, strategy) for name in names}
        found += [(text, verdict) for verdict in verify_on_ranks(cases, strategy)]
    return found


@pytest.mark.parametrize("jobs", [JOBS, by_hand(OTHERS)], ids=["each kind", "others"])
def test_two_ranks_compute_what_one_process_computes(
    jobs: dict[str, Sequence[str]], subtests: pytest.Subtests
) -> None:
    found = run_ranks(verdicts, 2, jobs, threads=1)[0]
    assert len(found) == sum(map(len, jobs.values()))
    for text, verdict in found:
        with subtests.test(f"{text} {verdict.case}"):
            assert verdict.is_equal, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize(
    "jobs",
    [
        {"pp2,fsdp2": ["qwen2, tied"]},
        {"pp2,dp2": ["tabled", "gemma3_text", "vit"]},
        {"pp2,dp2": FAMILIES, "pp2,fsdp2": FAMILIES},
    ],
    ids=" ".join,
)
def test_data_parallelism_beside_it(
    jobs: dict[str, Sequence[str]], subtests: pytest.Subtests
) -> None:
    for text, verdict in run_ranks(verdicts, 4, jobs, threads=1)[0]:
        with subtests.test(f"{text} {verdict.case}"):
            assert verdict.is_equal, str(verdict)


def test_the_links_are_what_is_before_the_blocks_each_block_and_what_is_after() -> None:
    assert links_of(hub("gpt2")) == [
        ["transformer.wte", "transformer.wpe"],
        *([f"transformer.h.{at}"] for at in range(3)),
        ["transformer.ln_f", "lm_head"],
    ]
    assert links_of(mlp()) == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert links_of(Convolutions()) == [["first"], ["second", "norm"], ["last"]]


def test_a_rank_keeps_the_parameters_of_its_stages_by_their_names() -> None:
    kept = []
    for pp_rank in range(2):
        model = MODELS["qwen2, tied"][0]()
        whole = {name: tensor.clone() for name, tensor in model.named_parameters()}
        Plan(Strategy.parse("pp2"), model, pp_rank=pp_rank).build(dry_run.CountingComm({"pp": 2}))
        mine = dict(model.named_parameters())
        assert all(torch.equal(tensor, whole[name]) for name, tensor in mine.items())
        kept.append(set(mine))
    assert kept[0] & kept[1] == {"model.embed_tokens.weight"}
    assert kept[0] | kept[1] == set(whole)


@pytest.mark.parametrize("chain", [PARTS, LAYERS], ids=len)
def test_a_module_with_two_names_is_on_the_ranks_of_its_stage(chain: Any) -> None:
    whole = Registered(chain)
    kept = []
    for pp_rank in range(2):
        model = Registered(chain)
        Plan(Strategy.parse("pp2"), model, pp_rank=pp_rank).build(dry_run.CountingComm({"pp": 2}))
        kept.append({name for name, _ in (*model.named_parameters(), *model.named_buffers())})
    names = [name for name, _ in (*whole.named_parameters(), *whole.named_buffers())]
    assert sorted(kept[0] | kept[1]) == sorted(names)
    assert not kept[0] & kept[1]


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(2, 2)])
        self.decoder = nn.ModuleList([nn.Linear(2, 2)])


class Unnamed(nn.Module):
    chain = ("first", "last")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])


class TwoNames(nn.Sequential):
    def __init__(self) -> None:
        layer = nn.Linear(2, 2)
        super().__init__(layer, nn.Tanh(), layer)


class SharedBlocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        self[2].weight = self[1].weight


class Misnamed(nn.Sequential):
    chain = ("0", "first")


class Nested(nn.Sequential):
    chain = ("0", "0")


@pytest.mark.parametrize(
    ("build", "text", "words"),
    [
        (TwoLists, "pp2", "TwoLists has 2 lists of blocks; expected one ModuleList"),
        (Unnamed, "pp2", "'norm' of Unnamed has running statistics, which every stage would"),
        (OwnParameter, "pp2", "the parameter 'positions' of OwnParameter is in no link"),
        (SharedBlocks, "pp3", "stages 1, 2 of SharedBlocks read one parameter, '1.weight'"),
        (functools.partial(Misnamed, nn.Linear(2, 2)), "pp2", "names 'first', which is not a mod"),
        (functools.partial(Nested, nn.Linear(2, 2)), "pp2", "names '0' twice, or also a mod"),
        (TwoNames, "pp2,cut:2+1", "stages 0, 1 of TwoNames read one parameter, '0.bias'"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Tanh()),
            "pp2,cut:1+2",
            "rank 1 of pp has no parameter in its layers, 1, 2",
        ),
        (mlp, "pp2,cut:2+4", "its cut has 2 stages of 6 layers in total, but there are 2 stages"),
        (mlp, "pp2,cut:1+2+2", "cut:3\\+2 is the best by the cost of"),
        (mlp, "pp6", "makes 6 stages, but the model is a chain of 5 layers: 0, 1, 2, 3, 4"),
        (mlp, "pp2,tp2", "tp with pp supports only phalanx's Decoder"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    build: Callable[[], nn.Module], text: str, words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        Plan(Strategy.parse(text), build())


def test_what_other_ranks_have_is_freed() -> None:
    model = mlp()
    absent = weakref.ref(model[0].weight)
    plan = Plan(Strategy.parse("pp2"), model, pp_rank=1)
    assert absent() is model[0].weight
    runner = plan.build(dry_run.CountingComm({"pp": 2}))
    assert absent() is None
    assert list(plan.model.named_parameters()) and runner is not None


Code = Callable[..., Any]


class Between(nn.Sequential):
    """Runs code of its own between its first layer and the second, and after the second."""

    def __init__(self, between: Code, after: Code = lambda y, of_x: y + of_x) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))
        self.between, self.after = between, after
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        of_x = self.between(x)
        return self[2](self.after(self[1](x), of_x))


def stages_of(model: nn.Module, cut: Sequence[range], here: Sequence[int]) -> ModuleStages:
    return ModuleStages(model, chain_by(skeleton_of(model), links_of(model), cut), here)


def output_of_stages(model: nn.Module) -> Tensor:
    """Run two stages, one after the other, on the same rank."""
    stages = stages_of(model, [range(1), range(1, 3)], [0, 1])
    stages.prepare()
    x = torch.linspace(-1, 1, 12).view(3, 4)
    sent = stages.run(0, None, lambda: model(x)).detach()
    return stages.run(1, sent.requires_grad_(), lambda: model(x))


def check_between(between: Code, *after: Code) -> None:
    torch.manual_seed(0)
    model = Between(between, *after)
    expected = model(torch.linspace(-1, 1, 12).view(3, 4))
    assert torch.equal(output_of_stages(model), expected)


USED = {
    "a mask": lambda x: x.sum(1, keepdim=True) == 0,
    "an index": lambda x: x.argmax(1, keepdim=True),
    "an order": lambda x: x.sort(1)[1],
    "a clamp": lambda x: x.nan_to_num(0).clamp(min=0),
    "a maximum": lambda x: torch.maximum(x, torch.zeros(4)),
    "a choice": lambda x: torch.where(x > 0, 1.0, 0.0),
    "what is written": lambda x: torch.zeros(3, 4).copy_(x),
    "what is filled": lambda x: torch.zeros(3, 4).masked_fill_(x > 0, 1.0),
    "a norm": lambda x: x.detach().norm(),
    "a size": lambda x: torch.full_like(x[:, 0], 2.0)[:, None] * x.std(),
}
READ = {
    "item": lambda x: x.sum().item(),
    "a branch": lambda x: 1.0 if (x > 0).any() else 2.0,
    "tolist": lambda x: x.sum().tolist(),
    "numpy": lambda x: float(x.detach().numpy().sum()),
    "allclose": lambda x: float(torch.allclose(x, x)),
    "the rows of a mask": lambda x: len(x[x > 0]),
    "places": lambda x: len(x.nonzero()),
    "a part of another": lambda x: torch.zeros(3, 4)[0].copy_(x[0]),
}
KNOWN = {
    "shapes": lambda x: x.size(0) * x.shape[1] * torch.ones(x.shape, dtype=x.dtype),
    "like": lambda x: torch.zeros_like(x) + x.new_ones(4) + torch.full_like(x, 2.0),
    "to another": lambda x: torch.arange(4).type_as(x).expand_as(x),
    "shown": lambda x: len(f"{x!r}") * 0.0,
}
"""Of what a layer has made, between two layers."""


@pytest.mark.parametrize("name", USED)
def test_what_is_made_of_an_absent_layer_is_not_used_after_the_cut(name: str) -> None:
    with pytest.raises(StrategyError, match="an output of stage 0 of Between is used by '"):
        check_between(USED[name])
    check_between(USED[name], lambda y, of_x: y)  # nothing needs it


@pytest.mark.parametrize("name", READ)
def test_numbers_of_an_absent_layer_are_not_read(name: str) -> None:
    with pytest.raises(StrategyError, match="Between reads the values of an output of stage 0, by"):
        check_between(READ[name])


@pytest.mark.parametrize("name", KNOWN)
def test_what_needs_no_number_of_an_absent_layer_is_right(name: str) -> None:
    check_between(KNOWN[name])


class Narrowing(nn.Sequential):
    """Asks for the shape that its first layer gives, after one that gives another."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self[0](x)
        narrow = self[1](wide.view(len(x), 2, 3))
        return self[2](narrow.flatten(1)) * wide.shape[1]


class Words(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).long()


class Paired(nn.Linear):
    """Gives what it makes beside nothing."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Tupled(nn.Sequential):
    """Asks for the shapes of its layers' outputs, which are in tuples or whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        words = self[0](x)
        wide, nothing = self[2](self[1](words))
        assert nothing is None
        return self[3](wide)[0] * wide.shape[1] * words.shape[0] * words.dtype.itemsize


def tupled() -> nn.Module:
    return Tupled(Words(), nn.Embedding(2, 6), Paired(6, 3), Paired(3, 2))


def narrowing() -> nn.Module:
    return Narrowing(nn.Linear(4, 6), nn.Linear(3, 1), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("build", "cut"),
    [
        (narrowing, [range(1), range(1, 2), range(2, 3)]),
        (tupled, [range(2), range(2, 3), range(3, 4)]),
    ],
)
def test_shapes_of_absent_layers_are_known(
    build: Callable[[], nn.Module], cut: list[range]
) -> None:
    model = build()
    x = torch.linspace(-1, 1, 12).view(3, 4)
    stages = stages_of(model, cut, range(3))
    stages.prepare()
    sent: Tensor | None = None
    for stage in range(3):
        sent = stages.run(stage, sent, lambda: model(x)).detach().requires_grad_()
    assert torch.equal(sent, model(x))


class Keyed(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": super().forward(x)}


class Numbered(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return super().forward(x), 1


@pytest.mark.parametrize(("layer", "what"), [(Keyed, "a dict,"), (Numbered, "a tuple with a int,")])
def test_a_layer_that_gives_more_than_tensors_is_named(layer: type[nn.Linear], what: str) -> None:
    model = nn.Sequential(layer(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    stages = stages_of(model, [range(1), range(1, 3)], [0, 1])
    stages.prepare()
    with pytest.raises(StrategyError, match=f"'0' of Sequential returns {what}"):
        stages.run(0, None, lambda: model(torch.ones(3, 4)))


class Normed(nn.Module):
    """Has a BatchNorm without parameters before its blocks, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.before = nn.Linear(12, 12), nn.BatchNorm1d(12, affine=False)
        self.blocks = nn.ModuleList(Residual(12, 12) for _ in range(3))
        self.after, self.head = nn.BatchNorm1d(12, affine=False), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(x))


def normed_on_ranks(kinds: Sequence[str]) -> list[tuple[dict[str, Tensor], Tensor | None]]:
    """Return the buffers that this rank has after a step, and an evaluation, of each kind of pp."""
    found: list[tuple[dict[str, Tensor], Tensor | None]] = []
    microbatches = torch.randn(5, 4, 12, generator=torch.Generator().manual_seed(2)).unbind()
    for kind in kinds:
        strategy = Strategy.parse(f"pp2:{kind}")
        comm, model = Ranks(strategy), Normed()
        runner = Plan(strategy, model, pp_rank=comm.coord("pp")).build(comm)
        runner(
            microbatches, lambda each, model=model: model(each).square().sum(), lambda sum_: sum_
        )
        model.eval()
        output = runner.infer(microbatches[0], lambda each, model=model: model(each))
        found.append((dict(model.named_buffers()), output))
    return found


def test_running_statistics_move_once_and_on_one_rank() -> None:
    kinds = ("1f1b", "interleaved/2", "zb/2", "zbv", "dualpipev")
    whole = Normed()
    microbatches = torch.randn(5, 4, 12, generator=torch.Generator().manual_seed(2)).unbind()
    for each in microbatches:
        whole(each)
    expected, output = dict(whole.named_buffers()), whole.eval()(microbatches[0]).detach()
    for of_ranks in zip(*run_ranks(normed_on_ranks, 2, kinds, threads=1), strict=True):
        buffers = of_ranks[0][0] | of_ranks[1][0]
        assert sum(len(each) for each, _ in of_ranks) == len(expected)
        torch.testing.assert_close(buffers, expected)
        (found,) = (each for _, each in of_ranks if each is not None)
        torch.testing.assert_close(found, output)


class Counting(Tabled):
    """Counts its forwards in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.count += 1
        return super().forward(input_ids)


def test_an_input_of_a_stage_is_what_was_received_for_all_who_use_it() -> None:
    check_between(lambda x: x, lambda y, x: y + x * (x > 0))


def test_a_list_of_blocks_alone_is_a_chain_of_them() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert links_of(model) == [["blocks.0"], ["blocks.1"]]


class Skips(nn.Sequential):
    """Its last layer takes what the first has made, past the second."""

    def forward(self, x: Tensor) -> Tensor:
        first = self[0](x)
        return self[2](self[1](first), first)


class Adds(nn.Linear):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x) + other


class Backwards(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


class Unused(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def run_one(text: str, model: nn.Module, inputs: str) -> None:
    case = Case(lambda: copy.deepcopy(model), Objective((inputs,)), batches(), 2)
    verify_on_ranks({"": case}, Strategy.parse(text))


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        (
            Skips(nn.Linear(12, 12), nn.Linear(12, 12), Adds(12, 12)),
            "pp2,cut:2+1",
            "'2' takes a second tensor that needs a gradient",
        ),
        by_hand(
            Backwards(nn.Linear(12, 12), nn.Linear(12, 12)),
            "pp2",
            "its chain is not in the order in which its modules run",
        ),
        by_hand(
            Unused(nn.Linear(12, 12), nn.Linear(12, 12)),
            "pp2",
            "did not reach the stage after 0",
        ),
        (
            past(),
            "pp2,cut:2+2",
            "an output of stage 0 of Past is used by '",
        ),
        (RecomputedTogether(), "pp2,cut:2+3", "recomputes layers of several stages together, and"),
        by_hand(
            RecomputedTogether(),
            "pp2:interleaved/2",
            "recomputes layers of several stages together",
        ),
        (
            Counting(),
            "pp2",
            "the buffer 'count' of Counting is in no link of its chain and changes",
        ),
        (with_detached(), "pp2,cut:1+3", "stage 1 computes no gradient of its input"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_forward_that_is_no_chain_is_named(model: nn.Module, text: str, words: str) -> None:
    inputs = "input_ids" if isinstance(model, Tabled) else "features"
    with pytest.raises(StrategyError, match=words):
        run_ranks(run_one, 2, text, model, inputs, threads=1)


class Keeping(nn.Module):
    """Keeps a loss of its own for the objective."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.kept = y.square().mean()
        return y


class Decaying:
    """An objective that reads all parameters."""

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        loss = model(microbatch[0]).square().sum()
        return loss + sum(p.square().sum() for p in model.parameters())

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch[0])


def keeping() -> nn.Module:
    return nn.Sequential(Keeping(), Keeping())


def step_of_an_objective_beside_the_output() -> None:
    comm = Ranks(Strategy.parse("pp2"))
    model = keeping()
    runner = Plan(Strategy.parse("pp2"), model, pp_rank=comm.coord("pp")).build(comm)
    objective = Decaying()
    runner(
        [(torch.ones(2, 6),)],
        lambda microbatch: objective.loss_sum(model, microbatch, 0),
        lambda summed: summed,
    )


def test_an_objective_that_reads_more_than_the_output_is_told() -> None:
    """The last stage alone has it, and what it reads of the others is not there."""
    with pytest.raises(StrategyError, match="the objective reads the parameters of Sequential"):
        run_ranks(step_of_an_objective_beside_the_output, 2, threads=1)


def words_of_a_first_stage() -> list[str]:
    model = keeping()
    stages = stages_of(model, [range(1), range(1, 2)], [0])
    stages.prepare()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            stages.run(0, None, lambda: model(torch.ones(2, 6)))
    return [str(each.message) for each in caught]


def test_what_a_stage_keeps_for_the_objective_is_told_once() -> None:
    (words,) = words_of_a_first_stage()
    assert words.startswith("pp: '0.kept' is a stored tensor with a gradient graph")
