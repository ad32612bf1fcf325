"""ZeRO 1-3 and HSDP: closed forms, first weights, precision, frozen and unused parameters.

That each computes what one process computes, and sends what traffic() says, is in tests/verify.
"""

import dataclasses
import functools
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.comm.fsdp import param_groups
from phalanx.comm.ledger import Entry, Ledger
from phalanx.config import OptimizerConfig
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.measure.memory import MemoryLedger
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel import sharded
from phalanx.parallel.groups import Group, Parameter, Place
from phalanx.parallel.plan import Plan, shard_of
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import StateBytes, Target
from phalanx.script.whole_weights import explain_shard_error
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import AdamW, build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches
from phalanx.verify.record import split

SHAPE = ModelShape(
    vocab_size=67,  # odd: no number of ranks divides it
    num_layers=3,
    hidden=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn=24,
    max_seq_len=16,
    tied=True,
)

EXPERTS = ExpertShape(num_experts=4, top_k=2, ffn=12)


def group(place: Place, *shapes: tuple[int, ...], is_kept: bool = True) -> Group:
    parameters = tuple(Parameter(shape) for shape in shapes)
    return Group(place, (place,), parameters, torch.float32, torch.float32, is_kept, 4)


# 4 blocks of 800 elements, and 400 elsewhere: P = 3,600 elements, 14,400 bytes.
GROUPS = [
    *(group("block", (40, 16), (160,), is_kept=n == 3) for n in range(4)),
    group("rest", (100, 4)),
]
P, ONCE = 4 * 3600, 4 * (800 + 400)


def over_groups(text: str, groups: Sequence[Group] = GROUPS) -> sharded.ShardedSplit:
    """Return the axis over groups that no model has."""
    with patch.object(sharded, "groups_of", lambda *_, **__: groups):
        return sharded.ShardedSplit(Target(Strategy.parse(text), skeleton_of(nn.Module())))


def held(text: str, accumulation: int = 1) -> StateBytes:
    """Return what a rank holds of the groups."""
    return over_groups(text).holds(StateBytes(0, 0, 0, 0, 0), accumulation)


@pytest.mark.parametrize(
    "kind, accumulation, sent",
    [
        by_hand("zero1", 1, 2 * P),
        by_hand("zero2", 1, 2 * P),
        by_hand("zero3", 1, 3 * P - ONCE),
        ("zero1", 5, 2 * P),
        ("zero2", 5, P + 5 * P),
        ("zero3", 5, 5 * (3 * P - ONCE)),
    ],
)
def test_traffic_in_closed_form(kind: sharded.Kind, accumulation: int, sent: int) -> None:
    batches = [(1, 8)] * accumulation
    entries = over_groups(f"dp2,fsdp4:{kind}").traffic(batches)
    of_fsdp = [e for e in entries if e.axis == "fsdp" and e.phase != "agree"]
    assert sum(e.sent_bytes for e in of_fsdp) == 3 / 4 * sent
    (across,) = [e for e in entries if e.axis == "dp" and e.phase != "agree"]
    assert across.op == "all_reduce"
    assert across.sent_bytes == 2 * 1 / 2 * P / 4
    assert {e.axis for e in over_groups(f"fsdp4:{kind}").traffic(batches)} == {"fsdp"}


def test_layout_in_closed_form() -> None:
    one, two, three = (
        held(f"fsdp4:{kind}", accumulation=2) for kind in ("zero1", "zero2", "zero3")
    )
    for holding in (one, two, three):
        assert holding.parameter_bytes == P // 4
        assert holding.optimizer_bytes == 2 * P // 4
    assert (one.gathered_bytes, two.gathered_bytes) == (P, P)
    # Two blocks, one at work and one on its way, and what is in none.
    assert three.gathered_bytes == 4 * (2 * 800 + 400)
    # Whole gradients of a block and of the rest, beside the shares of all.
    assert [h.unreduced_bytes for h in (one, two, three)] == [0, 4 * 1200, 4 * 1200]
    # The first microbatch has no shares yet: a block and the rest, and the shares behind it.
    first = held("fsdp4:zero2")
    assert first.gradient_bytes + first.unreduced_bytes == 4 * (400 + 800 + 3 * 200)
    assert [h.gradient_bytes for h in (one, two, three)] == [P, P // 4, P // 4]
    assert held("fsdp4:zero1").gradient_bytes == P // 4
    assert held("fsdp4,recompute:every/3").gathered_bytes == P


def test_rows_are_padded_on_their_way() -> None:
    (gather, *_) = over_groups("fsdp4", [group("rest", (5, 3))]).traffic([(1, 8)])
    assert gather.payload_bytes == 8 * 3 * 4


def fill(part: torch.Tensor, name: str, whole: tuple[int, ...], offset: tuple[int, ...]) -> None:
    fill_initial(SHAPE, 5, part, name, whole, offset)


def new_decoder(strategy: Strategy, dtype: torch.dtype = torch.float64):
    """Create a decoder on the meta device and split it; return it, its ranks and its runner."""
    comm = Ranks(strategy)
    with torch.device("meta"):
        model = Decoder(SHAPE).to(dtype)
    runner = Plan(strategy, model).build(comm, fill)
    return model, comm, runner


def created_in_parts(text: str) -> tuple[int, dict[str, torch.Tensor]]:
    model, _, _ = new_decoder(Strategy.parse(text))
    held = sum(shard_of(p)[0].numel() for p in model.parameters())
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    return held, whole


@pytest.mark.parametrize(
    "text", ["fsdp2", "fsdp3", *map(by_hand, ("dp2", "fsdp4:zero1", "dp2,fsdp2:zero2"))]
)
def test_first_weights_are_those_of_one_process_and_no_rank_makes_them_all(text: str) -> None:
    alone = Decoder(SHAPE).double()
    alone.initialize(5)
    expected = dict(alone.named_parameters())
    degree = Strategy.parse(text).fsdp.degree
    total = sum(p.numel() for p in expected.values())
    largest = 0
    for held, whole in run_ranks(created_in_parts, Strategy.parse(text).num_ranks, text):
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[name], expected[name]) for name in expected)
        largest = max(largest, held)
    assert largest <= total / degree * 1.1  # uneven rows


def most_held_in_creation(shape: ModelShape) -> tuple[int, int]:
    """Return the bytes of the whole model, and the most that this rank held while it was made."""
    strategy = Strategy.parse("fsdp4")
    comm = Ranks(strategy)
    with torch.device("meta"):
        model = Decoder(shape)
    nothing = torch.optim.SGD([torch.ones(1)])
    with MemoryLedger(nn.Identity(), nothing, "cpu") as ledger:
        Plan(strategy, model).build(comm, functools.partial(fill_initial, shape, 5))
    return sum(p.nbytes for p in model.parameters()), ledger.account().peak_bytes


def test_no_rank_ever_holds_more_than_its_share_and_a_little_to_draw_in() -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=16_384, hidden=256, ffn=512)
    drawing = 8 * 8 * 32_768  # of 32,768 numbers at a time, in 64 bits, a few times over
    for whole, most in run_ranks(most_held_in_creation, 4, shape):
        assert whole / 4 <= most <= whole / 4 + drawing < whole / 2


def bfloat16_losses(text: str, num_steps: int) -> tuple[list[float], list[Entry], list[Entry]]:
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    with torch.device("meta"):
        model = Decoder(SHAPE)
    model.compute_dtype = torch.bfloat16
    plan = Plan(strategy, model, compute=torch.bfloat16)
    predicted = plan.traffic([(8 // strategy.data_ranks // 2, 12)] * 2)
    runner = plan.build(comm, fill)
    config = OptimizerConfig(warmup_steps=0)
    step = Step(
        model, build_optimizer(model, config), NextToken(), config,
        comm=comm, num_steps=20, run=runner,
    )  # fmt: skip
    place, losses = comm.coord("data"), []
    for batch in decoder_batches(SHAPE, num_steps, 8, 12, strategy.data_ranks, 1):
        with Ledger(comm) as ledger, step.watched(ledger.phase):
            losses.append(step(split(batch, place, strategy.data_ranks, 2)).loss)
        entries = ledger.entries()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return losses, entries, predicted


@pytest.mark.parametrize("text", ["fsdp2,tp2", by_hand("tp4:2d"), by_hand("fsdp2,tp4:2d")])
def test_bfloat16_traffic_beside_tp(text: str) -> None:
    """fsdp hands tp narrow weights, whose gradients are summed as narrow."""
    strategy = Strategy.parse(text)
    _, entries, predicted = run_ranks(bfloat16_losses, strategy.num_ranks, text, 2, threads=1)[0]
    sent = {e for e in entries if e.phase not in ("count", "metrics", "clip")}
    assert sent == set(predicted)


def bfloat16_losses_of_each(
    texts: list[str],
) -> list[tuple[list[float], list[Entry], list[Entry]]]:
    return [bfloat16_losses(text, 3) for text in texts]


@pytest.mark.parametrize(
    "plain, texts",
    [
        ("dp2", ["fsdp2"]),
        by_hand("dp2", ["fsdp2:zero1", "fsdp2:zero2"]),
        by_hand("dp4", ["dp2,fsdp2"]),
    ],
)
def test_bfloat16_computes_alike_and_gathers_half(
    plain: str, texts: list[str], subtests: pytest.Subtests
) -> None:
    num_ranks = Strategy.parse(plain).num_ranks
    ranks = run_ranks(bfloat16_losses_of_each, num_ranks, [plain, *texts], threads=1)
    expected = ranks[0][0][0]
    for number, text in enumerate(texts, start=1):
        with subtests.test(text):
            for losses, entries, predicted in (of_rank[number] for of_rank in ranks):
                assert losses == pytest.approx(expected, rel=2e-3)
                sent = {e for e in entries if e.phase not in ("count", "metrics", "clip")}
                assert sent == set(predicted)


class Casting(nn.Linear):
    """A map that casts its weight, as a base in bfloat16 under an adapter in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Mixed(nn.Module):
    """One frozen bfloat16 weight, one that is used now and then, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Casting(6, 6), nn.Linear(6, 6)))
        self.blocks[0].weight.requires_grad_(False)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x).tanh()).tanh() * self.scale
        return self.sometimes(x) if uses else x


def uses(when: str, rank: int, index: int) -> bool:
    """Tell whether a rank uses `sometimes` in a microbatch."""
    return rank == 0 if when == "on the first rank" else index == 0


def mixed() -> Mixed:
    model = Mixed().double()
    model.blocks[0].weight.data = model.blocks[0].weight.bfloat16()
    return model


def gradients_of_mixed(text: str, when: str) -> tuple[dict[str, float | None], bool]:
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    torch.manual_seed(dist.get_rank())  # apply() must make weights and buffers equal
    model = mixed()
    plan = Plan(strategy, model)
    predicted, held = plan.traffic([(2, 6)] * 2), plan.holds()
    reducer = plan.build(comm).reducer
    samples = torch.arange(48, dtype=torch.float64).view(4, 2, 6).sin()
    with Ledger(comm) as ledger:
        for index in range(2):
            with ledger.phase("forward"):
                is_used = uses(when, dist.get_rank(), index)
                loss = model(samples[dist.get_rank(), index], is_used).sum()
            reducer.before_backward(reducer.parameters if index == 1 else ())
            with ledger.phase("backward"):
                loss.backward()
        reducer.finish(ledger.phase)
    alone = mixed()
    whole = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    alone.load_state_dict({**whole, "scale": model.scale})
    sum(
        alone(samples[r, i], uses(when, r, i)).sum()
        for r in range(strategy.num_ranks)
        for i in range(2)
    ).backward()
    errors = {
        name: None if p.grad is None else float((p.grad.full_tensor() - q.grad).abs().max())
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True)
    }
    optimizer = torch.optim.AdamW(model.parameters())  # the frozen weight gets no state
    for parameter in reducer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [x for each in optimizer.state.values() for x in each.values() if x.ndim]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    measured = [
        sum(shard_of(x)[0].nbytes for x in tensors)
        for tensors in (model.parameters(), grads, state)
    ]
    counted = [held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes]
    is_counted = dist.get_rank() > 0 or measured == counted  # the first rank has no padding
    return errors, is_counted and set(ledger.entries()) == set(predicted)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="before torch 2.13 FSDP2 wants every rank to use the same parameters",
)
@pytest.mark.parametrize(
    "text, when",
    [
        *((text, "on the first rank") for text in ("fsdp2",)),
        *(by_hand(text, "on the first rank") for text in ("fsdp4:zero1", "dp2,fsdp2")),
        *((text, "in the first microbatch") for text in ("fsdp2", "fsdp2:zero1")),
        by_hand("fsdp2:zero2", "in the first microbatch"),
    ],
)
def test_frozen_and_unused_parameters(text: str, when: str) -> None:
    ranks = run_ranks(gradients_of_mixed, Strategy.parse(text).num_ranks, text, when)
    for errors, is_predicted in ranks:
        assert is_predicted
        without = {name for name, error in errors.items() if error is None}
        assert without == {"blocks.0.weight", "never.weight", "never.bias"}
        assert max(error for error in errors.values() if error is not None) < 1e-12


def infer(text: str) -> list[bool]:
    """Return whether each parameter is split again after a forward without gradients."""
    model, _, _ = new_decoder(Strategy.parse(text))
    with torch.no_grad():
        model(torch.arange(8)[None])
    return [isinstance(p, DTensor) for p in model.parameters()]


@pytest.mark.parametrize("text", ["fsdp2", by_hand("fsdp2:zero1")])
def test_nothing_stays_gathered_after_inference(text: str) -> None:
    assert all(all(is_split) for is_split in run_ranks(infer, 2, text))


def overflow(text: str) -> tuple[float, float]:
    """Return the scale of a loss before and after a step whose gradient overflows on one rank."""
    model, comm, runner = new_decoder(Strategy.parse(text), torch.float32)
    config = OptimizerConfig(warmup_steps=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = Step(
        model, build_optimizer(model, config), NextToken(), config,
        comm=comm, num_steps=20, run=runner, scaler=scaler,
    )  # fmt: skip
    batch = decoder_batches(SHAPE, 1, 4, 12, 2, 1)[0]
    loss, num_valid = step.compute_gradients(split(batch, dist.get_rank(), 2, 1))
    before = scaler.get_scale()
    if dist.get_rank() == 0:
        part, _ = shard_of(model.embedding.weight.grad)
        part[0, 0] = torch.inf
    assert step.apply_gradients(loss, num_valid).is_skipped
    return before, scaler.get_scale()


@pytest.mark.parametrize("text", ["fsdp2", by_hand("fsdp2:zero1")])
def test_an_overflow_on_one_rank_lowers_the_scale_on_all(text: str) -> None:
    assert run_ranks(overflow, 2, text) == [(1024.0, 512.0)] * 2


def steps_of(kind: type[torch.optim.AdamW]) -> tuple[list[torch.Tensor], list[bool], bool]:
    """Return weights and moments after two steps, which moments are shards, and what is updated."""
    model, _, _ = new_decoder(Strategy.parse("fsdp2"))
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    with patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_) as fused:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = parameter.detach().sin()
            optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    found = [shard_of(tensor)[0].detach() for tensor in (*model.parameters(), *moments)]
    updated = fused.call_args.args[0]
    is_dtensor = [isinstance(moment, DTensor) for moment in moments]
    return found, is_dtensor, any(isinstance(tensor, DTensor) for tensor in updated)


def test_adamw_updates_shards_as_plain_tensors_to_the_bit_as_torchs() -> None:
    """Pins `_init_group`, which is private."""
    for ours, theirs in zip(
        run_ranks(steps_of, 2, AdamW, threads=1),
        run_ranks(steps_of, 2, torch.optim.AdamW, threads=1),
        strict=True,
    ):
        assert all(map(torch.equal, ours[0], theirs[0]))
        assert all(ours[1]) and all(theirs[1])
        assert (ours[2], theirs[2]) == (False, True)


def test_another_kind_of_dp_beside_fsdp_is_refused() -> None:
    with pytest.raises(StrategyError, match="would be ignored; write 'dp2,fsdp2'"):
        Plan(Strategy.parse("dp2:naive,fsdp2"), Decoder(SHAPE))


class Plain:
    """An output that pytree does not know."""

    def __init__(self, h: torch.Tensor, extra: torch.Tensor) -> None:
        self.h, self.extra = h, extra


class Slotted:
    __slots__ = ("extra", "h")

    def __init__(self, h: torch.Tensor, extra: torch.Tensor) -> None:
        self.h, self.extra = h, [extra]


class Late(torch.autograd.Function):
    """Adds to the gradient of a block's bias once the block's gradients have been reduced."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ctx.kept.pop().backward()
        return grad, None


class Layer(nn.Module):
    def __init__(self, way: str, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.way, self.kept = nn.Linear(6, 6), nn.Linear(6, 6), way, kept

    def forward(self, h: torch.Tensor):
        y = self.down(self.up(h).tanh())
        self.kept[:] = [self.up.bias.sum() if self.way == "late" else y]
        if self.way in ("plain", "slotted"):
            return (Plain if self.way == "plain" else Slotted)(h + y, y.pow(2))
        return h + y


class Applied(nn.Module):
    """Blocks that are recomputed twice, that return objects, or whose tensors are used outside."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept = way, list[torch.Tensor]()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Layer(way, self.kept) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, extra = self.first(x), 0.0
        for _ in range(2 if self.way == "twice" else 1):
            for number, block in enumerate(self.blocks):
                if self.way == "twice":
                    h = checkpoint(block, h, use_reentrant=True)
                elif self.way in ("plain", "slotted"):
                    out = block(h)
                    (part,) = out.extra if self.way == "slotted" else (out.extra,)
                    h, extra = out.h, extra + part
                elif number == 0:
                    h = block(Late.apply(h, self.kept) if self.way == "late" else h)
                elif self.way == "kept":
                    return self.kept[0].sum() + (0 * h).sum().detach()
        if self.way == "outside":
            h = nn.functional.linear(h, self.blocks[0].up.weight)
        elif self.way == "part":
            h = self.blocks[0].up(h)
        return h.sum() + (extra if isinstance(extra, float) else extra.sum())


def largest_error(text: str, way: str) -> float:
    """Return the largest error of a gradient, relative to one process."""
    torch.manual_seed(0)
    alone, model = Applied(way).double(), Applied(way).double()
    model.load_state_dict(alone.state_dict())
    reducer = Plan(Strategy.parse(text), model).build(Ranks(Strategy.parse(text))).reducer
    samples = torch.randn(dist.get_world_size(), 2, 3, 6, dtype=torch.float64)
    for index in range(2):
        loss = model(samples[dist.get_rank(), index])
        reducer.before_backward(reducer.parameters if index == 1 else ())
        loss.backward()
    reducer.finish()
    for part in samples.flatten(0, 1):
        alone(part).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((p.grad.full_tensor() / q.grad - 1).abs().max()) for p, q in pairs)


def errors_of_applied(text: str) -> list[float]:
    return [largest_error(text, way) for way in ("twice", "plain", "slotted")]


@pytest.mark.parametrize(
    "text", ["fsdp2", *map(by_hand, ("fsdp2:zero1", "fsdp2:zero2", "dp2,fsdp2"))]
)
def test_each_gradient_of_a_block_is_reduced_whatever_applies_it(text: str) -> None:
    """Also pins the states of FSDP2 that are read."""
    for errors in run_ranks(errors_of_applied, Strategy.parse(text).num_ranks, text):
        assert max(errors) < 1e-9


def refusals() -> list[str]:
    said: list[str] = []
    for way in ("late", "kept", "outside", "part"):
        try:
            largest_error("fsdp2", way)
        except (StrategyError, RuntimeError) as error:
            said.append(str(explain_shard_error(error) or error))
        else:
            said.append(f"{way} ran")
    return said


def test_a_use_of_a_weight_outside_its_block_is_refused_in_one_sentence() -> None:
    for late, kept, outside, part in run_ranks(refusals, 2):
        assert "the gradient of 'blocks.0.up.bias' would lack a part" in late
        assert "that is not in its output" in kept
        assert outside.startswith("the forward of 'Applied' reads a parameter of a block outside")
        assert part.startswith("the forward of 'blocks.0.up' reads a parameter of a block outside")


def sizes_of_groups(text: str) -> list[tuple[str, int, bool]]:
    """Return FSDP2's groups: module, shards, and whether they are experts."""
    strategy = Strategy.parse(text)
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(SHAPE, tied=False, experts=EXPERTS))
    Plan(strategy, model).build(Ranks(strategy), fill)
    experts = set(model.blocks[1].mlp.experts.parameters())
    return [
        (name, group.mesh_info.shard_mesh_size, group.fsdp_params[0].sharded_param in experts)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule) and name in ("", "embedding", "blocks.1")
        for group in param_groups(module)
    ]


def test_fsdp2_has_a_group_for_each_set_of_axes() -> None:
    (sizes, *_) = run_ranks(sizes_of_groups, 4, "fsdp2,ep2", threads=1)
    assert sorted(sizes) == [("blocks.1", 2, True), ("blocks.1", 4, False), ("embedding", 4, False)]
