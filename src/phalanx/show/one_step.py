"""One training step under a strategy: shards of each rank, and all collectives in call order.

The trainer's `Step` trains a small decoder for three steps. The second runs under the communication
ledger, whose events are listed with the forwards and backwards of the modules in the order in which
they started; the third runs under the memory ledger.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from typing_extensions import override

from phalanx.comm.algorithms.steps import runs_of
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger, Tally
from phalanx.config import OptimizerConfig
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.measure.memory import Kind, MemoryLedger
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.accumulate import Accumulate
from phalanx.parallel.data import BucketedReducer
from phalanx.parallel.plan import Plan, shard_of
from phalanx.parallel.reduce import buckets
from phalanx.report.tabular import Table
from phalanx.show.shown import Frame, MessageSent, Shown, ShowRun, Strip
from phalanx.show.strategies import STRATEGIES, Example
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches, split

SHAPE: Final = ModelShape(
    vocab_size=32, num_layers=2, hidden=32, num_heads=8, num_kv_heads=8, head_dim=4, ffn=64,
    max_seq_len=16,
)  # fmt: skip
ROWS: Final = 8
HELD: Final = ("embedding.weight", "blocks.0.attention.q.weight", "blocks.0.mlp.down.weight")
"""Parameters whose shards are shown."""
KINDS_SHOWN: Final[tuple[Kind, ...]] = (
    "parameters", "gathered", "gradients", "optimizer", "activations",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShowCube(ShowRun):
    """Run a layout of tensor parallelism on processes of this host, and print a training step."""

    ranks: int = 8
    """Ranks, processes of this host; the layout says which numbers there can be."""


class StepEvent(NamedTuple):
    """A forward or backward of a module, or a collective, in a step of a rank.

    Attributes:
        what: forward or backward with the name of the module, or the name of a collective.
        axis: axis of a collective; empty for a module.
        payload_bytes: bytes of the full tensor of a collective.
        sent: bytes that one rank sends in the collective.
    """

    phase: str
    what: str
    axis: str = ""
    payload_bytes: int = 0
    sent: float = 0.0


class Journal(Tally):
    """Tally that also records each collective as an event, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[StepEvent] = []

    @override
    def add(self, entry: Entry) -> None:
        super().add(entry)
        self.events.append(
            StepEvent(entry.phase, entry.op, entry.axis, entry.payload_bytes, entry.sent_bytes)
        )


class RankStep(NamedTuple):
    """Events, shards and memory of a rank.

    Attributes:
        events: modules and collectives of the second step, in order.
        shards: description of the shard of each parameter in HELD.
        positions: positions of a sample on this rank; empty if they are not split.
        at_most: peak bytes of each kind in a step, measured by the memory ledger.
        planned_sent: bytes that the plan predicts this rank sends in a step.
        loss: loss of the second step.
    """

    events: list[StepEvent]
    shards: list[str]
    positions: str
    at_most: dict[Kind, int]
    planned_sent: float
    loss: float


def show_step(topic: str, config: ShowRun) -> Shown:
    """Run a step under the strategy of a topic.

    Raises:
        ConfigError: the strategy cannot have this number of ranks.
    """
    example = STRATEGIES[topic]
    strategy = example.strategy_of(config.ranks)
    if strategy.num_ranks != config.ranks:
        raise ConfigError(
            f"ranks is {config.ranks}; {topic} needs two equal groups of ranks; the nearest is "
            f"{strategy.num_ranks}"
        )
    ranks: list[RankStep] = run_ranks(take_step, strategy.num_ranks, example, threads=1)
    first = ranks[0]
    grids: list[Table | Strip] = [holdings(ranks), memory(f"rank of {strategy}", ranks)]
    if example.beside:
        other = dataclasses.replace(example, strategy=example.beside)
        name = f"rank of {other.strategy_of(config.ranks)}"
        grids.append(memory(name, run_ranks(take_step, config.ranks, other, threads=1)))
    if example.goes_round:
        grids.append(hops(ranks))
    if example.bucket_bytes is not None:
        grids.append(bucket_grid(example, first.events))
    sent = sum(event.sent for event in first.events)
    is_same = len({each.loss for each in ranks}) == 1
    return Shown(
        f"{strategy}: a training step on {strategy.num_ranks} ranks",
        example.about,
        [
            *grids,
            journal(first.events),
            f"Rank 0 sends {sent:,.0f} bytes a step as the ledger counted, and the plan of the "
            f"strategy says {first.planned_sent:,.0f}. All ranks have "
            f"{f'the loss {first.loss:.6f}' if is_same else 'different losses: a bug in Phalanx'}. "
            f"phalanx verify {strategy} compares every gradient with one process.",
        ],
        example.in_torch,
    )


def holdings(ranks: Sequence[RankStep]) -> Table:
    """Return a table of the shards of HELD on each rank."""
    has_positions = ["positions"] if ranks[0].positions else []
    heads = ["rank", *(name.removesuffix(".weight") for name in HELD), *has_positions]
    rows = [
        [str(rank), *each.shards, *([each.positions] if has_positions else [])]
        for rank, each in enumerate(ranks)
    ]
    return Table("shards on each rank between steps", heads, rows, ["rank"])


def hops(ranks: Sequence[RankStep]) -> Strip:
    """Return the keys and values on each rank in each step of ring attention, and the sends."""
    num_ranks = len(ranks)
    num_bytes = next(event.payload_bytes for event in ranks[0].events if event.what == "send")
    frames = list[Frame]()
    for hop in range(num_ranks):
        cells = [[each.positions, ranks[rank - hop].positions] for rank, each in enumerate(ranks)]
        sent = [
            MessageSent(rank, (rank + 1) % num_ranks, "k, v", num_bytes)
            for rank in range(num_ranks)
        ]
        is_last = hop + 1 == num_ranks
        title = f"step {hop + 1} of {num_ranks}" + ("" if is_last else ", sent during attention")
        frames.append(Frame(title, cells, [] if is_last else sent))
    return Strip("attention of a block, forward", ["queries of", "keys, values of"], frames)


def memory(name: str, ranks: Sequence[RankStep]) -> Table:
    """Return a table of the peak bytes of each kind on each rank during a step."""
    rows = [
        [str(rank), *(f"{each.at_most[kind]:,}" for kind in KINDS_SHOWN)]
        for rank, each in enumerate(ranks)
    ]
    heads = [name, *KINDS_SHOWN]
    return Table("peak bytes of each kind during a step, measured", heads, rows, heads)


def bucket_grid(example: Example, events: Sequence[StepEvent]) -> Table:
    """Return a table of the parameters of each bucket, and the backward that overlapped it."""
    model = _model(example)
    names = [name for name, _ in model.named_parameters()]
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert example.bucket_bytes is not None
    cuts, under, rows = iter(buckets(sizes, example.bucket_bytes)), "", list[list[str]]()
    for event in events:
        if event.phase == "backward" and event.axis:
            members = [names[index].removesuffix(".weight") for index in next(cuts)]
            listed = ", ".join(members[:1] + members[-1:] if len(members) > 2 else members)
            listed += f" and {len(members) - 2} between" if len(members) > 2 else ""
            rows.append([str(len(rows)), listed, f"{event.payload_bytes:,}", under])
        elif event.phase == "backward":
            under = event.what
    heads = ["bucket", "parameters", "bytes", "sent during"]
    return Table("buckets, in the order of sending", heads, rows, ["bucket", "bytes"])


def journal(events: Sequence[StepEvent]) -> Table:
    """Return a table of the events of a step; consecutive equal events are one row."""
    rows = list[list[str]]()
    for event, alike in itertools.groupby(events):
        times = len(list(alike))
        count = f" x {times}" if times > 1 else ""
        if event.axis:
            numbers = [event.axis, f"{event.payload_bytes * times:,}", f"{event.sent * times:,.0f}"]
            rows.append([event.phase, f"    {event.what}{count}", *numbers])
        else:
            rows.append([event.phase, f"{event.what}{count}", "", "", ""])
    heads = [
        "phase",
        "compute, and collectives as they start",
        "axis",
        "tensor bytes",
        "sent bytes",
    ]
    return Table("the step on rank 0, in order", heads, rows, heads[3:])


def take_step(example: Example) -> RankStep:
    """Run three steps on this rank: warm-up, under the ledger, and under the memory ledger."""
    # This logger warns, once per layout, that torch gathers a weight axis by axis.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    strategy = example.strategy_of(torch.distributed.get_world_size())
    comm, model = Ranks(strategy), _model(example)
    plan = Plan(strategy, model)
    runner = plan.build(comm)
    if example.bucket_bytes is not None:
        runner = Accumulate(BucketedReducer([*model.parameters()], comm, example.bucket_bytes))
    config = OptimizerConfig()
    step = Step(
        model, build_optimizer(model, config), NextToken(), config, comm=comm, num_steps=3,
        run=runner,
    )  # fmt: skip
    seq_len = SHAPE.max_seq_len
    batches = decoder_batches(model.shape, 2, ROWS, seq_len, 1)
    batches_of_rank = [split(batch, comm.coord("data"), comm.size("data"), 1) for batch in batches]
    step(batches_of_rank[0])
    notes = Journal()
    ledger = Ledger(comm, notes)
    note_modules(model, lambda what: notes.events.append(StepEvent(ledger.phase_name, what)))
    with step.watched(ledger.phase), ledger:
        result = step(batches_of_rank[1])
    shards = [
        _shard_text(parameter) for name, parameter in model.named_parameters() if name in HELD
    ]
    num_rows = len(batches_of_rank[1][0].tokens_BT)
    planned = sum(entry.sent_bytes for entry in plan.traffic([(num_rows, seq_len)]))
    counted = {"count", "metrics", "clip"}  # collectives of the trainer, the same for any strategy
    events = [event for event in notes.events if event.phase not in counted]
    with MemoryLedger(model, step.optimizer, comm.device) as held, step.watched(held.phase):
        step(batches_of_rank[1])
    return RankStep(
        events,
        shards,
        positions_text(plan, comm.rank),
        held.account().at_most,
        planned,
        result.loss,
    )


def positions_text(plan: Plan[Decoder], rank: int) -> str:
    """Return the positions of a sample on a rank, such as "0-1, 14-15"; empty if not split."""
    if plan.order is None:
        return ""
    num_held = plan.order.num_held(SHAPE.max_seq_len)
    held: list[int] = plan.order.positions(rank, num_held).tolist()
    ends = runs_of(held)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)


def _model(example: Example) -> Decoder:
    model = Decoder(ModelShape(**{**vars(SHAPE), **example.shape}))
    model.initialize(0)
    return model


def note_modules(model: Decoder, note: Callable[[str], None]) -> None:
    """Call `note` at the start of each forward and backward of embedding, blocks and head."""
    seen = set[str]()

    def on_forward(name: str, *_: object) -> None:
        note(f"forward {name}{' again' if name in seen else ''}")
        seen.add(name)

    def on_backward(name: str, *_: object) -> None:
        note(f"backward {name}")

    blocks = {f"block {number}": block for number, block in enumerate(model.blocks)}
    # Hook attention in place of its block, because recomputation does not call block.forward.
    inner = {name: block.get_submodule("attention") for name, block in blocks.items()}
    for name, module in {"embedding": model.embedding, **inner, "head": model.output}.items():
        module.register_forward_pre_hook(functools.partial(on_forward, name))
    for name, module in {**blocks, "head": model.output}.items():
        module.register_full_backward_pre_hook(functools.partial(on_backward, name))


def _shard_text(parameter: torch.Tensor) -> str:
    """Describe the shard of a parameter on this rank, such as "rows 0-7" or "all 32 x 32"."""
    shard, begin = shard_of(parameter)
    whole = " x ".join(map(str, parameter.shape))
    if shard.shape == parameter.shape:
        return f"all {whole}"
    names = ("rows", "columns")
    parts = [
        f"{name} {at}-{at + size - 1}" if size else "nothing"
        for name, at, size, full in zip(names, begin, shard.shape, parameter.shape, strict=False)
        if size != full
    ]
    return f"{', '.join(parts)}"
