"""Compare each collective call between the ranks before it runs (`--debug-comm`).

    rank 0  ──> store: group, number, fingerprint ──┐  all arrived:  equal      run the collective
    rank 1  ──> store: group, number, fingerprint ──┤                different  same error on all
    rank 2  ──> has not arrived ────────────────────┘  report its place and the call of the others

The first rank to arrive stores its fingerprint, with which each other rank compares its own. The
last rank, which a counter identifies, releases all. So the number of store requests per rank does
not depend on the size of the group. Only if a fingerprint differs, or the shapes that ranks send
and receive are uneven, each rank reads the fingerprints of all.

A `CollectiveCheck` is a dispatch mode, so it is active in the thread that entered it and in the
autograd threads of its backward; collectives of other threads are not checked. The ranks
synchronize at each call, even of an asynchronous collective, so all ranks must make their calls in
the same order, across groups too. A collective of `Comm.all_reduce_start` is called only when it is
waited for, because gradients become ready in a different order on each rank.

A send and its receive are compared when the second of the two is called, without synchronization:
see messages.py.

A rank that waits for long, in a call or, with `Comm`, for a message, stores for which ranks it
waits. Ranks that wait for each other in a cycle never continue, so they raise an error.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.comm import Ranks
from phalanx.comm.waits import around_waits
from phalanx.comm.watch import Watch
from phalanx.debug.check_store import GRACE_S, LEFT, CheckStore, described
from phalanx.debug.deadlock import Edge
from phalanx.debug.fingerprint import Fingerprint, difference, find_places, take
from phalanx.debug.messages import Messages
from phalanx.errors import CollectiveMismatch, named

LIMIT_S = 30.0
"""Longest wait for the other ranks to arrive at a call, in seconds."""


@dataclass(frozen=True)
class Meeting:
    """One collective call of a group, at which all ranks of the group must arrive.

    Attributes:
        axis: name of the group's mesh axis, or "world".
        number: number of the call on this group, from 1.
    """

    group: str
    axis: str
    ranks: tuple[int, ...]
    number: int

    def key(self, what: int | str) -> str:
        """Return the store key of a rank's fingerprint, or one of the keys that all ranks use.

        These are "first" (fingerprint of the first rank to arrive), "unlike" (fingerprints must be
        compared), "count" (of ranks that arrived) and "all" (set by the last rank to arrive).
        """
        return f"{self.group}/{self.number}/{what}"

    def __str__(self) -> str:
        where = f"{named(self.ranks)}; group {self.group}"
        return f"call {self.number} on {self.axis} ({where})"


class CollectiveCheck(Watch):
    """Dispatch mode that compares the collectives inside `with CollectiveCheck(comm):`.

    Every rank of the job must enter and leave the block at the same place of the program.
    """

    def __init__(
        self,
        comm: Ranks,
        *,
        named: Mapping[str, torch.Tensor] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Connect to the job's store.

        Args:
            comm: gives the mesh axes that messages name.
            named: tensors to name in messages, such as the parameters of a model; their gradients
                are named too.
            limit_s: longest wait for a rank that does not arrive, in seconds.
        """
        super().__init__()
        self.phase_name = ""
        self._comm = comm
        self._axis_of = comm.axis_by_ranks()
        self._named = dict(named or {})
        self._numbers: Counter[str] = Counter()
        self._telling = ExitStack()
        self._check_store = CheckStore(limit_s)
        self._messages = Messages(self._check_store)
        self._store = self._check_store.store
        self._rank = self._check_store.rank

    @override
    def __enter__(self) -> Self:
        self._telling.enter_context(self._comm.compared())
        self._telling.enter_context(around_waits(self._messages.wait_for))
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._store.set(f"gone/{self._rank}", LEFT if error is None else repr(error))
            if error is None:
                self._messages.leave()
        except dist.DistNetworkError:
            if error is None:
                raise  # otherwise `error` propagates, which matters more
        finally:
            self._telling.close()
            super().__exit__(kind, error, trace)

    @override
    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        """Compare a collective between the ranks, then run it."""
        if len(call.ranks) > 1:
            with self._check_store.explaining_lost_store():
                places, module = find_places(inspect.currentframe())
                tensor = module or self._name_of(call)
                fingerprint = take(call, tensor=tensor, places=places, phase=self.phase_name)
                if call.op == "recv_any_source":
                    self._messages.receive_any(call)
                elif call.op in ("send", "recv"):
                    self._messages.pair(call, fingerprint)
                else:
                    self._meet(call, fingerprint)
        return run()

    # Collectives: all ranks of the group synchronize.

    def _meet(self, call: Call, fingerprint: Fingerprint) -> None:
        """Wait for the other ranks of the group, and raise if their calls do not match."""
        group = call.group.group_name
        self._numbers[group] += 1
        axis = self._axis_of.get(call.ranks, "world")
        meeting = Meeting(group, axis, call.ranks, self._numbers[group])
        text = fingerprint.text()
        self._store.set(f"last/{self._rank}", json.dumps([text, str(meeting)]))
        self._store.set(meeting.key(self._rank), text)
        is_unlike = self._come(meeting, fingerprint)
        if meeting.number > 1:
            # All ranks are at this call, so all have read the keys of the previous call.
            last = dataclasses.replace(meeting, number=meeting.number - 1)
            self._store.delete_key(last.key(self._rank))
            if self._rank == last.ranks[0]:
                for key in ("first", "unlike", "count", "all"):
                    self._store.delete_key(last.key(key))
        if not is_unlike:
            return
        texts = self._store.multi_get([meeting.key(rank) for rank in call.ranks])
        calls = {r: Fingerprint.read(t) for r, t in zip(call.ranks, texts, strict=True)}
        if mismatch := difference(calls, self._has_name):
            one, other, what = mismatch
            raise self._check_store.verdict(
                f"ranks {one} and {other} differ at {meeting}, in the {what}\n"
                f"{described(one, calls[one])}\n{described(other, calls[other])}\n"
                "Each rank of a group must make the same calls in the same order."
            )

    def _come(self, meeting: Meeting, fingerprint: Fingerprint) -> bool:
        """Wait until all ranks are at a call; return whether their calls must be compared."""
        # A call of three ranks, in which rank 2 differs:
        #
        #     rank 0   first := text 0                       count 1    wait for "all"
        #     rank 1   equal to first                        count 2    wait
        #     rank 2   differs: unlike := ""                 count 3    last: all := "unlike"
        #     all      read all three texts, and raise the same verdict
        #
        # Without a difference the requests of a rank do not depend on the number of ranks.
        store, text = self._store, fingerprint.text()
        first = store.compare_set(meeting.key("first"), "", text).decode()
        if first != text or not fingerprint.is_even:
            store.set(meeting.key("unlike"), "")
        if store.add(meeting.key("count"), 1) == len(meeting.ranks):
            is_unlike = store.check([meeting.key("unlike")])
            store.set(meeting.key("all"), "unlike" if is_unlike else "alike")
            return is_unlike
        waits = f"{described(self._rank, fingerprint)}\n{'':10}waits there, {meeting}"

        def look(waited_s: float) -> None:
            # The ranks that are not at the call, by bisection, because these are few.
            missing: list[int] = []
            asked = [meeting.ranks]
            while asked:
                ranks = asked.pop()
                if self._store.check([meeting.key(rank) for rank in ranks]):
                    continue
                if len(ranks) == 1:
                    missing += ranks
                else:
                    asked += [ranks[len(ranks) // 2 :], ranks[: len(ranks) // 2]]
            why, advice = "", ""
            for rank in missing:
                end = self._check_store.read(f"gone/{rank}")
                if end == LEFT:
                    why = f"rank {rank} has finished without an error and will not reach {meeting}"
                    advice = "\nEach rank must make the same number of calls."
                    break
                if end is not None and waited_s > min(GRACE_S, self._check_store.limit_s):
                    why = f"rank {rank} has ended by {end} and will not reach {meeting}"
                    break
            if missing and not why and waited_s > self._check_store.limit_s:
                limit = f"{self._check_store.limit_s:g} s"
                why = f"{named(missing)} did not reach {meeting} within {limit}"
            if why:
                raise self._check_store.verdict(f"{why}\n{self._scene(meeting, missing)}{advice}")
            self._check_store.refuse_deadlock(
                [Edge(rank, meeting.key(rank), False) for rank in missing], waits
            )

        # One store serves all ranks: the larger the group, the longer the polling interval.
        longest_s = 2e-3 * max(1.0, len(meeting.ranks) / 8)
        try:
            self._check_store.poll(lambda: self._store.check([meeting.key("all")]), look, longest_s)
        except CollectiveMismatch:
            # A rank that arrives later must not count as the last, and run the collective.
            self._store.add(meeting.key("count"), -1)
            self._store.delete_key(meeting.key(self._rank))
            raise
        return store.get(meeting.key("all")) == b"unlike"

    def _scene(self, meeting: Meeting, missing: list[int]) -> str:
        """Describe the call in which a rank waits, and the last call of each missing rank."""
        waiting = next(rank for rank in meeting.ranks if rank not in missing)
        others = [rank for rank in meeting.ranks if rank not in (waiting, *missing)]
        too = f", as {'does' if len(others) == 1 else 'do'} {named(others)}" if others else ""
        lines: list[str] = []
        for rank in (waiting, *missing):
            if (text := self._check_store.read(f"last/{rank}")) is None:
                lines.append(f"  rank {rank}: has made no call yet")
                continue
            call, which = json.loads(text)
            how = f"was its last call{which and ', '}{which}"
            if rank == waiting:
                how = f"waits there{too}"
            lines.append(f"{described(rank, Fingerprint.read(call))}\n{'':10}{how}")
        return "\n".join(lines)

    # Names of tensors.

    def _name_of(self, call: Call) -> str:
        """Return the name of the tensor at the address of the call's first input, or ""."""
        first = next((one for one in call.inputs if isinstance(one, torch.Tensor)), None)
        if first is None or not first.numel():
            return ""
        address = first.data_ptr()
        for name, tensor in self._named.items():
            if _address(tensor) == address:
                return name
            if tensor.is_leaf and tensor.grad is not None and _address(tensor.grad) == address:
                return f"{name}.grad"
        return ""

    def _has_name(self, name: str) -> bool:
        return name.startswith("FSDP module ") or name.removesuffix(".grad") in self._named


def _address(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local().data_ptr()
    return tensor.data_ptr()
