"""Count every collective: its op, bytes, mesh axis and phase, whoever called it.

A `Ledger` reads each collective with comm.calls. It costs a few microseconds for each tensor
operation; use it for the steps that are counted, not for all.

`payload_bytes` is the size of the whole tensor of the collective (the gathered, reduced or
broadcast one); `sent_bytes` is what one rank must send under a bandwidth-optimal algorithm over N
ranks (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009):

    all_reduce                                                        2 (N-1)/N
    all_gather, reduce_scatter, all_to_all, broadcast, reduce, ...      (N-1)/N
    send                                                              1
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.calls import Call, read_call
from phalanx.comm.watch import Watch

if TYPE_CHECKING:
    from phalanx.comm.comm import Comm

Phase = Callable[[str], AbstractContextManager[None]]
"""`with phase("backward"):` books what runs inside under that name."""


def no_phase(name: str) -> AbstractContextManager[None]:
    """Book nothing: the phase of a step that nobody watches."""
    del name
    return nullcontext()


WITHOUT_PAYLOAD = ("barrier", "recv", "recv_any_source")
"""Collectives that move no payload of their own: a receive is counted where it is sent."""


@dataclass(frozen=True)
class Entry:
    """One collective, or several that are alike added up.

    Attributes:
        phase: what the step was doing, such as "forward", "backward" or "clip".
        axis: name of the mesh axis, several joined by "_", or "world".
        op: name of the collective.
        calls: how many.
        payload_bytes: bytes of the whole tensors.
        sent_bytes: bytes that one rank must send, on average over the axis.
    """

    phase: str
    axis: str
    op: str
    calls: int
    payload_bytes: int
    sent_bytes: float


def sent_bytes(op: str, payload_bytes: float, num_ranks: int) -> float:
    """Return the bytes that one of `num_ranks` must send for `op` under an optimal algorithm."""
    if op == "send":
        return payload_bytes
    return payload_bytes * (2 if op == "all_reduce" else 1) * (num_ranks - 1) / num_ranks


class Tally:
    """Adds up collectives that are alike."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], tuple[int, int, float]] = {}

    def add(self, phase: str, axis: str, op: str, payload_bytes: int, num_ranks: int) -> None:
        """Count one more collective."""
        calls, payloads, sent = self._sums.get((phase, axis, op), (0, 0, 0.0))
        self._sums[phase, axis, op] = (
            calls + 1,
            payloads + payload_bytes,
            sent + sent_bytes(op, payload_bytes, num_ranks),
        )

    def entries(self) -> list[Entry]:
        """Return the sums, in the order first seen."""
        return [Entry(*key, *sums) for key, sums in self._sums.items()]


class Ledger(Watch):
    """Counts the collectives that run inside `with Ledger(comm) as ledger:`."""

    def __init__(self, comm: Comm, tally: Tally | None = None) -> None:
        """Count into a tally of one's own, if there is one."""
        super().__init__()
        self._axis_of = comm.axis_by_ranks()
        self._tally = Tally() if tally is None else tally

    def entries(self) -> list[Entry]:
        """Return what was counted, alike collectives added up, in the order first seen."""
        return self._tally.entries()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count the operator if it is a collective, and run it."""
        call = read_call(func, args, kwargs)
        if call is not None and call.op not in WITHOUT_PAYLOAD:
            axis, num_ranks = self._axis_of.get(call.ranks, "world"), len(call.ranks)
            payload = _payload_bytes(call, num_ranks)
            self._tally.add(self.phase_name, axis, call.op, payload, num_ranks)
        return func(*args, **kwargs)


def _payload_bytes(call: Call, num_ranks: int) -> int:
    """Return the bytes of the whole tensor: the largest of what goes in and what comes out.

    A gather's input is one rank's shard, and a scatter's output is: the whole is N times the shard.
    """
    sizes = [_bytes(tensors) for tensors in (call.inputs, call.outputs) if tensors]
    if call.op in ("gather", "scatter"):  # only the root has the whole
        return min(size for size in sizes if size) * num_ranks
    is_functional_gather = call.op == "all_gather" and len(sizes) == 1
    return sizes[0] * num_ranks if is_functional_gather else max(sizes)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)
