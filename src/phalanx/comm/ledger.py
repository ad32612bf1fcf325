"""Count every collective by op, bytes, mesh axis and phase, whichever library calls it.

A `Ledger` is a watch of collectives (comm.watch); other operators cost nothing under it.

`payload_bytes` is the size of the full tensor of the collective (the gathered, reduced or
broadcast one); `sent_bytes` is the number of bytes that one rank must send under a
bandwidth-optimal algorithm over N ranks (Patarasuk and Yuan, Bandwidth optimal all-reduce
algorithms, 2009), as a multiple of `payload_bytes`:

    all_reduce                                                        2 (N-1)/N
    all_gather, reduce_scatter, all_to_all, broadcast, reduce, ...      (N-1)/N
    send                                                              1
    all_to_all of uneven pieces    the rows of this rank for others, of all its rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.watch import CallWatch

if TYPE_CHECKING:
    from phalanx.comm.comm import Comm

Phase = Callable[[str], AbstractContextManager[None]]
"""`with phase("backward"):` attributes the collectives inside the block to that phase."""


def no_phase(name: str) -> AbstractContextManager[None]:
    """Return a context that does nothing, for a step that no ledger counts."""
    del name
    return nullcontext()


WITHOUT_PAYLOAD = ("barrier", "recv", "recv_any_source")
"""Collectives without a payload to count; the bytes of a message are counted at its send."""


@dataclass(frozen=True)
class Entry:
    """The totals of all collectives with the same phase, axis and op.

    Attributes:
        phase: phase of the step, such as "forward", "backward" or "clip".
        axis: name of the mesh axis, several joined by "_", or "world".
        op: name of the collective.
        calls: number of calls.
        payload_bytes: bytes of the full tensors; of an uneven all-to-all, all rows of this rank.
        sent_bytes: bytes that one rank must send, on average over the axis; the bytes that this
            rank sends in an uneven all-to-all.
    """

    phase: str
    axis: str
    op: str
    calls: int
    payload_bytes: int
    sent_bytes: float


def sent_bytes(op: str, payload_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each of `num_ranks` sends for `op` under an optimal algorithm."""
    if op == "send":
        return payload_bytes
    return payload_bytes * (2 if op == "all_reduce" else 1) * (num_ranks - 1) / num_ranks


def sent_in_pieces(payload_bytes: float, sizes: Sequence[int], coord: int) -> float:
    """Return the bytes of uneven pieces, one a rank, without the piece of the rank at `coord`."""
    return payload_bytes * (sum(sizes) - sizes[coord]) / max(1, sum(sizes))


class Tally:
    """Running totals of collectives by phase, axis and op."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        """Add up `entries`."""
        self._sums: dict[tuple[str, str, str], Entry] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add a collective, or several of one phase, axis and op."""
        key = entry.phase, entry.axis, entry.op
        had = self._sums.get(key, Entry(*key, 0, 0, 0.0))
        self._sums[key] = Entry(
            *key,
            had.calls + entry.calls,
            had.payload_bytes + entry.payload_bytes,
            had.sent_bytes + entry.sent_bytes,
        )

    def entries(self) -> list[Entry]:
        """Return the totals, in the order of their first calls."""
        return [*self._sums.values()]


class Ledger(CallWatch):
    """Counts the collectives that run inside `with Ledger(comm) as ledger:`."""

    def __init__(self, comm: Comm, tally: Tally | None = None) -> None:
        """Count into `tally`, or into a new one if None; `comm` gives axes their names."""
        super().__init__()
        self._axis_of = comm.axis_by_ranks()
        self._tally = Tally() if tally is None else tally

    def entries(self) -> list[Entry]:
        """Return one entry per phase, axis and op, in the order of their first calls."""
        return self._tally.entries()

    @override
    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        """Run a collective, and count it if it has a payload."""
        if call.op not in WITHOUT_PAYLOAD:
            axis, payload = self.axis_of(call), payload_bytes(call)
            self._tally.add(Entry(self.phase_name, axis, call.op, 1, payload, sent_by(call)))
        return run()

    def axis_of(self, call: Call) -> str:
        """Return the mesh axis of a collective, see `Comm.axis_by_ranks`; else "world"."""
        return self._axis_of.get(call.ranks, "world")


def payload_bytes(call: Call) -> int:
    """Return the bytes of the full tensor of a collective, or of a message that is received."""
    sizes = [_bytes(tensors) for tensors in (call.inputs, call.outputs) if tensors]
    if call.op in ("gather", "scatter"):  # only the root has the full tensor, N shards
        return min(size for size in sizes if size) * len(call.ranks)
    if call.op == "all_gather" and len(sizes) == 1:  # the op allocates the output
        return sizes[0] * len(call.ranks)
    if call.op == "all_to_all":  # the two may differ if pieces do
        return sizes[0]
    return 0 if call.op == "barrier" else max(sizes)


def sent_by(call: Call) -> float:
    """Return the bytes of a collective that this rank must send under an optimal algorithm."""
    payload, sizes = payload_bytes(call), call.arguments.get("input_split_sizes")
    if call.op == "all_to_all" and sizes and "partner" not in call.arguments:
        return sent_in_pieces(payload, sizes, call.group.rank())
    return sent_bytes(call.op, payload, len(call.ranks))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)
