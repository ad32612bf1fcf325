"""Run the steps of a collective on this rank, over point-to-point messages.

All messages of a step are one batch (`torch.distributed.batch_isend_irecv`), so that NCCL runs them
side by side. A rank takes part in the steps that name it, and nobody waits for a whole step to end.

[Note: Order] NCCL knows no tags and matches the messages of two ranks by their order alone; and a
rank that waits for one collective takes no step of another. So the collectives of a rank run one
after the other, in the order of their calls, over whatever groups: to wait for one completes those
before it. One that is called with `async_op` begins its first step at once if none is before it,
and takes the others when it, or a later one, is waited for, as in MPI.
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
"""Of the messages of collectives over gloo, which a user's own messages do not use."""

Combine = Callable[[Tensor, Tensor], Tensor]

REDUCTIONS: Final[Mapping[str, Combine]] = {
    **reductions.REDUCTIONS,
    "product": torch.mul,
    "avg": torch.add,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
"""Name of a reduction -> how a rank adds what comes in to its own; avg divides at the end."""


def combine_of(reduction: str, dtype: torch.dtype) -> Combine:
    """Return how two tensors of a type are reduced.

    Raises:
        ConfigError: there is no such reduction, or the type has no bits to combine.
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
    """What a rank holds of a collective."""

    def __getitem__(self, chunks: range) -> Tensor:
        """Return consecutive chunks as one tensor of one dimension, which is written to as well."""
        ...


class Flat:
    """The chunks of one tensor, nearly equal in size."""

    def __init__(self, flat: Tensor, num_chunks: int) -> None:
        self.flat = flat
        self._bounds = cut(flat.numel(), num_chunks)

    def __getitem__(self, chunks: range) -> Tensor:
        return self.flat[self._bounds[chunks[0]].start : self._bounds[chunks[-1]].stop]


class Passing:
    """The chunks of an all-to-all: given, for this rank, or made when they pass through."""

    def __init__(self, given: Tensor, output: Tensor, rank: int) -> None:
        """Hold rows: row s of `given` is for rank s, row r of `output` comes from rank r."""
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
    """A collective under way on this rank; its tensors must be left alone until `wait`.

    Attributes:
        steps: what all ranks do.
        num_done: the steps that this rank has taken.
    """

    def __init__(
        self,
        steps: Steps,
        held: Chunks,
        group: dist.ProcessGroup,
        combine: Combine = torch.add,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a collective; `finish` is called once all steps are done."""
        super().__init__()
        self.steps = steps
        self.num_done = 0
        self._held, self._group, self._combine, self._finish = held, group, combine, finish
        self._messages: list[tuple[Move, Tensor]] = []
        self._works: list[dist.Work] = []

    def begin(self) -> Collective:
        """Take the place after all others, and begin if there are none."""
        if self._group not in _CONNECTED:
            _CONNECTED.add(self._group)
            connect(self._group, fully=True)
        _UNDER_WAY.append(self)
        if _UNDER_WAY[0] is self:
            self._begin_step()
        return self

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete this collective and those before it; gloo's own timeout holds."""
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
        """Take the steps that are left, one at a time, and yield each when it is done."""
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
        """Begin to send and receive what the next step has for this rank."""
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
    """Complete the collectives that are under way, see [Note: Order]."""
    if _UNDER_WAY:
        _UNDER_WAY[-1].wait()


_UNDER_WAY: deque[Collective] = deque()
"""Of this rank, in the order of the calls."""

_CONNECTED: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups whose ranks are all connected, see comm/join.py; at its first use a group does it."""
