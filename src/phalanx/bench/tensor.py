"""One decoder block under layouts of tensor parallelism: bytes moved and held, calls and time.

Each layout runs on real ranks, gloo processes on this host. What moves is counted by the ledger,
what is kept for backward by what autograd saves, and time is that of the slowest rank. Layouts of
as many ranks take turns, step by step, so that a change of the machine's load meets all alike.
Those of other numbers of ranks share the same cores among other numbers of processes, so that their
times say nothing to one another. Beside each stands what the plan says (`bench.account`).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from phalanx.bench.account import (
    PATTERNS,
    Amounts,
    OneBlock,
    Precision,
    crossing_tokens,
    product_flops,
    theory,
)
from phalanx.bench.block import DEFAULT_SIZES, BlockSize
from phalanx.bench.verb import ResultConfig, use_threads
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.ledger import Entry, Ledger, Phase, no_phase
from phalanx.comm.together import barrier
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.measure.environment import MEMORY_SHARE, free_memory_bytes, has_fast_bfloat16
from phalanx.measure.memory import MemoryLedger
from phalanx.measure.products import quick_ceiling
from phalanx.models.attention import rotation
from phalanx.models.initial import fill_initial
from phalanx.parallel.plan import shard_of
from phalanx.parallel.reduce import ReplicaReducer
from phalanx.parallel.split import Target
from phalanx.parallel.tensor.scope import batch_scope
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.planner.fit import check_memory_for
from phalanx.strategy import Axis, Strategy, require_built


@dataclass(frozen=True, kw_only=True)
class TensorConfig(ResultConfig):
    """Measure one decoder block under layouts of tensor parallelism, on CPU ranks of this host."""

    layouts: tuple[str, ...] = ("tp4", "tp4:megatron", "tp4:2d", "tp8", "tp8:2.5d/2", "tp8:3d")
    """Strategies of tp alone."""
    sizes: tuple[str, ...] = DEFAULT_SIZES
    """Width of the block and its microbatch, each HIDDENxROWSxPOSITIONS."""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Data type of the arithmetic; auto: bfloat16 where the CPU has it, else float32."""
    repeats: Annotated[int, Range(0)] = 5
    """Steps to time of each layout, which take turns; 0 only counts."""


@dataclass(frozen=True, kw_only=True)
class LayoutPoint:
    """What the first rank moved and held under one layout on one size, and what it should.

    Attributes:
        peak_bytes: most it held at one time: weights, gradients, activations and all buffers.
        times_s: of each step, by the slowest rank; empty if none was timed.
        products_s: what the products with weights alone would take at the ceiling.
    """

    strategy: str
    size: BlockSize
    measured: Amounts
    theory: Amounts
    entries: list[Entry]
    peak_bytes: int
    times_s: list[float]
    products_s: float | None

    @property
    def median_s(self) -> float | None:
        """Median time of a step."""
        return statistics.median(self.times_s) if self.times_s else None


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """From how many tokens a microbatch on a layout sends less than one dimension does."""

    strategy: str
    hidden: int
    num_tokens: float


@dataclass(frozen=True, kw_only=True)
class TensorRun:
    """What `measure_tensor` found, in the order asked for: sizes, and the layouts of each."""

    precision: Precision
    num_repeats: int
    threads: int | None
    points: tuple[LayoutPoint, ...]
    crossings: tuple[Crossing, ...]


def measure_tensor(config: TensorConfig) -> TensorRun:
    """Measure one block, forward and backward, under each layout at each size.

    Raises:
        ConfigError: a text cannot be read, a layout does not divide a size, or memory is short.
    """
    use_threads(config.threads)
    precision, repeats, threads = config.dtype, config.repeats, config.threads
    if precision == "auto":
        precision = "bfloat16" if has_fast_bfloat16("cpu") else "float32"
    strategies = [parse_layout(text) for text in config.layouts]
    block_sizes = [BlockSize.parse(text) for text in config.sizes]
    check_memory_for(max((strategy.num_ranks for strategy in strategies), default=0))
    for size in block_sizes:
        for strategy in strategies:
            check_size(strategy, size, precision)
    by_ranks: defaultdict[int, list[str]] = defaultdict(list)
    for strategy in strategies:
        by_ranks[strategy.num_ranks].append(str(strategy))
    found: dict[tuple[str, str], LayoutPoint] = {}
    for num_ranks, texts in by_ranks.items():
        ranks: list[list[LayoutPoint]] = run_ranks(
            measure_rank, num_ranks, texts, block_sizes, precision, repeats, threads=threads
        )
        found |= {(str(point.size), point.strategy): point for point in ranks[0]}
    return TensorRun(
        precision=precision,
        num_repeats=repeats,
        threads=threads,
        points=tuple(found[str(size), str(s)] for size in block_sizes for s in strategies),
        crossings=tuple(
            Crossing(
                strategy=str(strategy),
                hidden=hidden,
                num_tokens=crossing_tokens(strategy, BlockSize(hidden, 1, 1).shape, precision),
            )
            for hidden in dict.fromkeys(size.hidden for size in block_sizes)
            for strategy in strategies
            if len(strategy.grid()) > 1
        ),
    )


def parse_layout(text: str) -> Strategy:
    """Read the strategy of a layout.

    Raises:
        StrategyError: it cannot be read.
        ConfigError: it has more than tp, or no tp.
    """
    strategy = Strategy.parse(text)
    if strategy != Strategy(tp=strategy.tp) or strategy.tp.degree == 1:
        nearest = Strategy(tp=strategy.tp if strategy.tp.degree > 1 else Axis(2, "1d"))
        raise ConfigError(
            f"layout is '{text}'; it must be tp alone with a degree above 1, such as {nearest}"
        )
    require_built(strategy)
    return strategy


def check_size(strategy: Strategy, size: BlockSize, precision: Precision) -> None:
    """Raise ConfigError for what the layout does not divide, and would pad, or does not fit."""
    model = OneBlock(size.shape, precision)
    layout = TensorSplit(Target(strategy, model, roles=PATTERNS)).layout
    for dim, (what, number) in enumerate((("rows", size.num_rows), ("positions", size.length))):
        parts = layout.residual.num_shards(dim, layout.comm)
        if number % parts:
            raise ConfigError(
                f"size {size}: {strategy} splits {what} in {parts}, and {number} is not a multiple "
                f"of that; the nearest is {max(1, round(number / parts)) * parts}"
            )
    held = theory(strategy, size.shape, size.batch, precision)
    full = size.num_tokens * size.hidden * model.compute.itemsize
    rank_bytes = 2 * held.weight_bytes + 2 * held.kept_bytes + 3 * full
    need_bytes, free_bytes = strategy.num_ranks * rank_bytes, free_memory_bytes("cpu")
    if need_bytes > MEMORY_SHARE * free_bytes:
        raise ConfigError(
            f"size {size}: the ranks of {strategy} need about {need_bytes / 2**30:.1f} GiB, "
            f"{MEMORY_SHARE:.0%} of the free {free_bytes / 2**30:.1f} GiB are allowed; take "
            "fewer rows or a smaller width"
        )


class SplitBlock:
    """A block split over the ranks of this job, with this rank's part of one microbatch."""

    def __init__(self, strategy: Strategy, size: BlockSize, precision: Precision) -> None:
        """Split it, and make its weights and a microbatch; every rank calls this."""
        self.strategy, self.size, self.precision = strategy, size, precision
        comm = self.comm = Ranks(strategy)
        shape = size.shape
        self.model = OneBlock(shape, precision)
        dtype = self.model.compute
        split = TensorSplit(Target(strategy, self.model, roles=PATTERNS))
        split.apply(comm)
        self.layout = split.layout
        self.model.to_empty(device="cpu")
        for name, parameter in self.model.named_parameters():
            shard, offset = shard_of(parameter)
            fill_initial(shape, 0, shard, name, parameter.shape, offset)
        self.angles = rotation(shape, torch.arange(size.length)[None], dtype)
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(size.num_rows, size.length, size.hidden, generator=generator)
        self.x = self.layout.shard(whole, self.layout.residual).to(dtype).requires_grad_()
        self.d_y = torch.randn(self.x.shape, generator=generator).to(dtype)
        self.reducer = ReplicaReducer(self.model.parameters(), comm, None)

    def forward(self) -> Tensor:
        """Run the block, which has no embedding that would know the batch."""
        with batch_scope(self.size.batch):
            return self.model(self.x, self.angles)

    def step(self, phase: Phase = no_phase) -> None:
        """Run forward and backward, and add up the gradients of what several ranks hold."""
        self.x.grad = None
        self.model.zero_grad()
        with phase("forward"):
            y = self.forward()
        with phase("backward"):
            y.backward(self.d_y)
        self.reducer.finish(phase)

    def count(self) -> tuple[Amounts, list[Entry], int]:
        """Return what this rank moves and holds, its collectives, and the peak in bytes."""
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(local_shard(tensor))
            return tensor

        ledger = Ledger(self.comm.mesh)
        with ledger, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.step(ledger.phase)
        weights = [local_shard(parameter) for parameter in self.model.parameters()]
        known = {_storage(tensor)[0] for tensor in (*weights, *(self.angles or ()))}
        storages = dict(_storage(tensor) for tensor in kept)
        entries = ledger.entries()
        amounts = Amounts(
            sent_bytes=sum(entry.sent_bytes for entry in entries),
            num_calls=sum(entry.calls for entry in entries),
            weight_bytes=sum(weight.nbytes for weight in weights),
            kept_bytes=sum(size for place, size in storages.items() if place not in known),
        )
        kept.clear()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        with MemoryLedger(self.model, optimizer, "cpu") as memory:
            self.step(memory.phase)
        return amounts, entries, memory.account().peak_bytes


def measure_rank(
    texts: Sequence[str], sizes: Sequence[BlockSize], precision: Precision, repeats: int
) -> list[LayoutPoint]:
    """Measure on one rank of as many as each strategy has; times are those of this rank."""
    barrier()
    rate = quick_ceiling("cpu", precision) if repeats else None
    points: list[LayoutPoint] = []
    for size in sizes:
        blocks = [SplitBlock(Strategy.parse(text), size, precision) for text in texts]
        counts = [block.count() for block in blocks]
        times_s = time_in_turns(blocks, repeats)
        for block, (amounts, entries, peak_bytes), own_times_s in zip(
            blocks, counts, times_s, strict=True
        ):
            flops = product_flops(block.strategy, size.shape, size.num_tokens)
            points.append(
                LayoutPoint(
                    strategy=str(block.strategy),
                    size=size,
                    measured=amounts,
                    theory=theory(block.strategy, size.shape, size.batch, precision),
                    entries=entries,
                    peak_bytes=peak_bytes,
                    times_s=own_times_s,
                    products_s=None if rate is None else flops / rate,
                )
            )
    return points


def time_in_turns(blocks: Sequence[SplitBlock], repeats: int) -> list[list[float]]:
    """Return the seconds of `repeats` steps of each block, which take turns, after one to warm up.

    A step begins when all ranks are ready and ends when all have ended theirs.
    """
    times_s: list[list[float]] = [[] for _ in blocks]
    for turn in range(repeats + 1 if repeats else 0):
        for block, own_times_s in zip(blocks, times_s, strict=True):
            barrier()
            begin_s = time.perf_counter()
            block.step()
            barrier()
            if turn:
                own_times_s.append(time.perf_counter() - begin_s)
    return times_s


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's storage lies, and its bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
