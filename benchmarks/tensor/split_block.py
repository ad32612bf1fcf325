"""A block split by a layout over the ranks of a job; one rank's part of the measurement.

What moves is counted by the ledger, what is kept for backward by what autograd saves, and time is
that of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from account import Amounts, product_flops, theory
from block import PATTERNS, BlockSize, OneBlock, Precision
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.ledger import Entry, Ledger, Phase, no_phase
from phalanx.comm.together import barrier
from phalanx.measure.memory import MemoryLedger
from phalanx.measure.products import quick_ceiling
from phalanx.models.attention import rotation
from phalanx.models.initial import fill_initial
from phalanx.parallel.batch_shape import batch_scope
from phalanx.parallel.plan import shard_of
from phalanx.parallel.reduce import ReplicaReducer
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.strategy import Strategy


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


class SplitBlock:
    """A block split over the ranks of this job, with this rank's part of one microbatch."""

    def __init__(self, strategy: Strategy, size: BlockSize, precision: Precision) -> None:
        """Split it, and make its weights and a microbatch; every rank calls this."""
        self.strategy, self.size, self.precision = strategy, size, precision
        comm = self.comm = Ranks(strategy)
        shape = size.shape
        self.model = OneBlock(shape, precision)
        dtype = self.model.compute
        target = Target(strategy, skeleton_of(self.model), roles=PATTERNS)
        TensorSplit(target).apply(self.model, comm)
        self.layout = layout_of(strategy, comm)
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

        ledger = Ledger(self.comm)
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
