"""Run the steps of a collective on this rank, over point-to-point messages.

All messages of a step are one batch (`torch.distributed.batch_isend_irecv`), so that NCCL runs them
concurrently. A rank takes part only in steps that include it, and ranks do not synchronize between
steps.

[Note: Order] NCCL has no tags and matches the messages of two ranks only by their order, and a rank
that waits for one collective runs no steps of another. So the collectives of a rank run one after
another in the order of their calls, across all groups: waiting for a collective first completes the
collectives before it. A collective called with `async_op` starts its first step at once if no other
is running, and runs the remaining steps when it, or a later one, is waited for, as in MPI.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from phalanx.comm import reductions
from phalanx.comm.algorithms.steps import CollectiveStep, Move, Steps, cut
from phalanx.comm.join import connect
from phalanx.errors import ConfigError, nearest

TAG: Final = 2**30 - 1
"""Tag of the collectives' messages over gloo, which must not be used for a user's messages."""

Combine = Callable[[Tensor, Tensor], Tensor]

REDUCTIONS: Final[Mapping[str, Combine]] = {
    **reductions.REDUCTIONS,
    "product": torch.mul,
    "avg": torch.add,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
"""Name of a reduction -> function that combines two tensors; avg is a sum, divided at the end."""


def combine_of(reduction: str, dtype: torch.dtype) -> Combine:
    """Return the function that reduces two tensors of `dtype`.

    Raises:
        ConfigError: the reduction does not exist, or is bitwise and `dtype` is not integer or bool.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(
            f"the reduction is '{reduction}'{nearest(reduction, REDUCTIONS)}; expected one of "
            f"{', '.join(REDUCTIONS)}"
        )
    if reduction in ("and", "or", "xor") and (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(
            f"the reduction '{reduction}' combines bits, and the tensor is {dtype}; give integers "
            "or bools, the nearest is tensor.view(torch.int64)"
        )
    return REDUCTIONS[reduction]


class Chunks(Protocol):
    """The chunks of a collective on this rank."""

    def __getitem__(self, chunks: range) -> Tensor:
        """Return consecutive chunks as a one-dimensional tensor, which the caller may write."""
        ...


class FlatChunks:
    """The chunks of one flat tensor, which are nearly equal in size."""

    def __init__(self, flat: Tensor, num_chunks: int) -> None:
        self.flat = flat
        self._bounds = cut(flat.numel(), num_chunks)

    def __getitem__(self, chunks: range) -> Tensor:
        return self.flat[self._bounds[chunks[0]].start : self._bounds[chunks[-1]].stop]


class AllToAllChunks:
    """The chunks of an all-to-all: from this rank, to this rank, and buffers for forwarded ones."""

    def __init__(self, given: Tensor, output: Tensor, rank: int) -> None:
        """Use row s of `given` as the chunk to rank s, row r of `output` as the one from rank r."""
        num_ranks = len(given)
        self._rows = {s * num_ranks + rank: output[s] for s in range(num_ranks)}
        self._rows |= {rank * num_ranks + s: given[s] for s in range(num_ranks) if s != rank}
        output[rank].copy_(given[rank])
        self._like = output[0]

    def __getitem__(self, chunks: range) -> Tensor:
        (chunk,) = chunks
        if chunk not in self._rows:
            self._rows[chunk] = torch.empty_like(self._like)
        return self._rows[chunk]


class Collective(dist.Work):
    """A running collective on this rank; its tensors must not be used before `wait`.

    Attributes:
        steps: steps of all ranks.
        num_done: number of steps that this rank has completed.
    """

    def __init__(
        self,
        steps: Steps,
        held: Chunks,
        group: dist.ProcessGroup,
        combine: Combine = torch.add,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a collective on the chunks `held`; `finish` is called after the last step."""
        super().__init__()
        self.steps = steps
        self.num_done = 0
        self._held, self._group, self._combine, self._finish = held, group, combine, finish
        self._messages: list[tuple[Move, Tensor]] = []
        self._works: list[dist.Work] = []

    def begin(self) -> Collective:
        """Enqueue this collective, and start its first step if no other is running."""
        if self._group not in _CONNECTED:
            _CONNECTED.add(self._group)
            connect(self._group, fully=True)
        _UNDER_WAY.append(self)
        if _UNDER_WAY[0] is self:
            self._begin_step()
        return self

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete this collective and all before it; the timeout is the group's."""
        while self in _UNDER_WAY:
            first = _UNDER_WAY[0]
            for _ in first.remaining():
                pass
            first._finish()
            _UNDER_WAY.popleft()
        return True

    @override
    def is_completed(self) -> bool:
        return self not in _UNDER_WAY

    def remaining(self) -> Iterator[CollectiveStep]:
        """Run the remaining steps one at a time, and yield each when it is complete."""
        while self.num_done < len(self.steps):
            if not self._works:
                self._begin_step()
            for work in self._works:
                work.wait()
            for move, incoming in self._messages:
                mine = self._held[move.chunks]
                mine.copy_(self._combine(mine, incoming) if move.is_reduced else incoming)
            self._messages, self._works = [], []
            self.num_done += 1
            yield self.steps[self.num_done - 1]

    def _begin_step(self) -> None:
        """Start this rank's sends and receives of the next step."""
        if self.num_done == len(self.steps):
            return
        rank, group = self._group.rank(), self._group
        operations: list[dist.P2POp] = []
        for move in self.steps[self.num_done].moves:
            if rank not in (move.source, move.target):
                continue
            mine = self._held[move.chunks]
            if not mine.numel():
                continue
            if move.source == rank:
                operation: Any = dist.isend, mine, move.target
            else:
                incoming = torch.empty_like(mine)
                self._messages.append((move, incoming))
                operation = dist.irecv, incoming, move.source
            function, tensor, peer = operation
            operations.append(dist.P2POp(function, tensor, None, group, TAG, peer))
        if operations:
            self._works = dist.batch_isend_irecv(operations)


def drain() -> None:
    """Complete all running collectives, see [Note: Order]."""
    if _UNDER_WAY:
        _UNDER_WAY[-1].wait()


_UNDER_WAY: deque[Collective] = deque()
"""Running collectives of this rank, in the order of their calls."""

_CONNECTED: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups in which all pairs of ranks are connected (comm/join.py), by their first collective."""
