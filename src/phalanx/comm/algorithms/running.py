"""Run the steps of a collective on this rank, over point-to-point messages.

All messages of a step are one batch (`torch.distributed.batch_isend_irecv`), so that NCCL runs them
concurrently. A rank takes part only in steps that include it, and ranks do not synchronize between
steps.

[Note: Order] NCCL has no tags and matches the messages of two ranks only by their order, and a rank
that waits for one collective runs no steps of another. So the collectives of a rank run one after
another in the order of their calls, across all groups: waiting for a collective first completes the
collectives before it. A collective called with `async_op` sends its header at once if no other is
running, and runs its steps when it, or a later one, is waited for, as in MPI.

[Note: Headers] Ranks that make different calls would reduce to wrong numbers or be aborted by gloo.
So each rank first sends all others a header, its call in words, and begins no step before it has
all headers. A rank whose arguments are invalid sends the reason in place of its call. So all ranks
raise an error at the same call, and no message is left that a later collective would receive.
Headers take one round of 256 bytes, which dispatch modes such as the ledger do not see.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from phalanx.comm import reductions
from phalanx.comm.algorithms.steps import CollectiveStep, Move, Steps, cut
from phalanx.comm.call_number import mismatch
from phalanx.comm.join import connect
from phalanx.comm.together import reason_of
from phalanx.comm.waits import waiting
from phalanx.comm.watch import unwatched
from phalanx.errors import ConfigError, PeerLost, named, nearest

TAG: Final = 2**30 - 1
"""Tag of the collectives' messages over gloo, which must not be used for a user's messages."""

HEADER_TAG: Final = TAG - 1
"""Tag of the headers over gloo, which must not be used for a user's messages."""

HEADER_BYTES: Final = 256

REFUSED: Final = "refused: "
"""Begin of the header of a rank whose call has invalid arguments; the reason follows."""

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
        # P = 3 on rank 1, chunk r P + s is from rank r to rank s: chunks 3 and 5 are sent, 1 and 7
        # are received, 4 is copied; 0, 2, 6 and 8 may pass through, and get a buffer when they do.
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
        call: str,
        steps: Steps,
        held: Chunks,
        group: dist.ProcessGroup,
        combine: Combine = torch.add,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a collective on the chunks `held`; `finish` is called after the last step.

        `call` describes the call in words that must be equal on all ranks, see [Note: Headers].
        """
        super().__init__()
        self.steps = steps
        self.num_done = 0
        self._call = call
        self._held, self._group, self._combine, self._finish = held, group, combine, finish
        self._headers: list[Tensor] = []
        self._has_agreed = group.size() == 1
        self._messages: list[tuple[Move, Tensor]] = []
        self._works: list[dist.Work] = []
        self._peers: list[int] = []
        self._error: Exception | None = None

    def begin(self) -> Collective:
        """Enqueue this collective, and send its header if no other is running.

        Raises:
            PeerLost: another rank has ended, or has timed out, while the ranks connected.
        """
        if self._group not in _CONNECTED:
            with lost_peer_named(self._group, self._others(), self._call), waiting():
                connect(self._group, fully=True)
            _CONNECTED.add(self._group)
        if not _UNDER_WAY:
            self._send_header()
        _UNDER_WAY.append(self)
        return self

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete this collective and all before it; the timeout is the group's.

        Raises:
            CollectiveMismatch: the ranks have made different calls.
            PeerLost: another rank has ended, has timed out or has refused its call.
        """
        with waiting():
            # First to last, although the caller needs only this one: NCCL matches by order, so a
            # rank that ran a later call first would receive the messages of an earlier one, see
            # [Note: Order].
            while self in _UNDER_WAY:
                first = _UNDER_WAY[0]
                try:
                    for _ in first.remaining():
                        pass
                    first._finish()
                except Exception as error:  # for the `wait` of `first`: the others can complete
                    first._error = error
                finally:
                    _UNDER_WAY.popleft()
        if self._error is not None:
            raise self._error
        return True

    @override
    def is_completed(self) -> bool:
        return self not in _UNDER_WAY

    def remaining(self) -> Iterator[CollectiveStep]:
        """Run the remaining steps one at a time, and yield each when it is complete."""
        if not self._has_agreed:
            self._agree()
        while self.num_done < len(self.steps):
            rank = self._group.rank()
            operations: list[tuple[Any, Tensor, int]] = []
            for move in self.steps[self.num_done].moves:
                if rank not in (move.source, move.target):
                    continue
                mine = self._held[move.chunks]
                # Fewer elements than chunks leave empty chunks. Both ends know their size, and
                # neither sends.
                if not mine.numel():
                    continue
                if move.source == rank:
                    operations.append((dist.isend, mine, move.target))
                else:
                    # Not received in place: in halving a rank sends a chunk in the step in which it
                    # receives it, and a step sends the values from before the step.
                    incoming = torch.empty_like(mine)
                    self._messages.append((move, incoming))
                    operations.append((dist.irecv, incoming, move.source))
            self._begin_messages(operations, TAG)
            self._complete_messages()
            for move, incoming in self._messages:
                mine = self._held[move.chunks]
                mine.copy_(self._combine(mine, incoming) if move.is_reduced else incoming)
            self._messages = []
            self.num_done += 1
            yield self.steps[self.num_done - 1]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size()) if rank != self._group.rank()]

    def _send_header(self) -> None:
        """Start to send this rank's header, and to receive the other headers."""
        if self._has_agreed:
            return
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        text = bytearray(self._call.encode()[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
        mine = torch.frombuffer(text, dtype=torch.uint8).to(device)
        self._headers = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._headers[self._group.rank()] = mine
        sends = [(dist.isend, mine, peer) for peer in self._others()]
        receives = [(dist.irecv, self._headers[peer], peer) for peer in self._others()]
        with unwatched():
            self._begin_messages([*sends, *receives], HEADER_TAG)

    def _agree(self) -> None:
        """Wait for the headers of all ranks, and compare them, see [Note: Headers]."""
        if not self._headers:
            self._send_header()
        self._complete_messages()
        self._has_agreed = True
        if self._call.startswith(REFUSED):  # this rank has raised the reason
            return
        ranks = dist.get_process_group_ranks(self._group)
        calls: defaultdict[str, list[int]] = defaultdict(list)
        for rank, header in zip(ranks, self._headers, strict=True):
            text = bytes(header.tolist()).rstrip(b"\0").decode(errors="replace")
            if text.startswith(REFUSED):
                raise PeerLost(f"{named([rank])} has {text}; so no rank runs {self._call}")
            calls[text].append(rank)
        if len(calls) > 1:
            raise mismatch(calls)

    def _begin_messages(self, operations: Sequence[tuple[Any, Tensor, int]], tag: int) -> None:
        group, self._peers = self._group, [peer for _, _, peer in operations]
        batch = [
            dist.P2POp(run, tensor, None, group, tag, peer) for run, tensor, peer in operations
        ]
        with lost_peer_named(group, self._peers, self._call):
            self._works = dist.batch_isend_irecv(batch) if batch else []

    def _complete_messages(self) -> None:
        is_one_each = len(self._works) == len(self._peers)  # with NCCL one work is for all
        for number, work in enumerate(self._works):
            peers = self._peers[number : number + 1] if is_one_each else self._peers
            with lost_peer_named(self._group, peers, self._call):
                work.wait()
        self._works = []


@contextmanager
def lost_peer_named(group: dist.ProcessGroup, peers: Sequence[int], call: str) -> Generator[None]:
    """Raise PeerLost, which names the group ranks `peers`, for an error of gloo or NCCL."""
    try:
        yield
    except RuntimeError as error:
        ranks, others = dist.get_process_group_ranks(group), sorted({*peers})
        who = named([ranks[peer] for peer in others])
        lost = "has not answered within the timeout" if "imed out" in str(error) else "has ended"
        raise PeerLost(
            f"{'one of ' if len(others) > 1 else ''}{who} {lost}; {named([ranks[group.rank()]])} "
            f"has waited in vain for another rank in {call}"
        ) from error


def refuse(group: dist.ProcessGroup, error: Exception) -> None:
    """Send the other ranks, which make the same call, the reason why this rank does not."""
    refusal = Collective(f"{REFUSED}{reason_of(error)}", (), FlatChunks(torch.empty(0), 1), group)
    with suppress(PeerLost):
        refusal.begin()


def drain() -> None:
    """Complete all running collectives, see [Note: Order]."""
    if _UNDER_WAY:
        _UNDER_WAY[-1].wait()


_UNDER_WAY: deque[Collective] = deque()
"""Running collectives of this rank, in the order of their calls."""

_CONNECTED: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups in which all pairs of ranks are connected (comm/join.py), by their first collective."""
