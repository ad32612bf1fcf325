"""Compare each collective with the other ranks' before it runs (`--debug-comm`).

    rank 0  ──> store: group, number, fingerprint ──┐  all there:     alike    run the collective
    rank 1  ──> store: group, number, fingerprint ──┤                 unlike   the same error on all
    rank 2  ──> not there ──────────────────────────┘  say where it is, and what the others wait in

The first to come leaves its fingerprint for the others to compare with, and the last, who is known
by a count, lets all continue: a rank makes as many calls to the store in a group of any size. Only
where one differs, or ranks give and take unlike shapes, each reads what all others said.

A `CollectiveCheck` is a dispatch mode, so it belongs to the thread that entered it, and to the
threads of autograd that work for it: the collectives of any other thread pass unseen. The ranks
meet at each call, even of an asynchronous collective; all must make their calls in one order,
across groups too. What `Comm.all_reduce_start` begins is called where it is waited for: gradients
are ready in another order on each rank.

A send and its receive are compared when the second of them is called, without a meeting: see
messages.py.

A rank that waits for long says for whom, in a call or, by `Comm`, for a message. Ranks that wait
for each other in a cycle never continue, and hear so.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.comm.calls import Call, read_call
from phalanx.comm.comm import Ranks
from phalanx.comm.waits import around_waits
from phalanx.comm.watch import Watch
from phalanx.debug.deadlock import Edge
from phalanx.debug.fingerprint import Fingerprint, difference, find_places, take
from phalanx.debug.messages import Messages
from phalanx.debug.words import GRACE_S, LEFT, Words, described
from phalanx.errors import CollectiveMismatch, named

LIMIT_S = 30.0
"""How long a rank waits for the others to come to a call."""


@dataclass(frozen=True)
class Meeting:
    """One call on one group, which each rank of the group comes to.

    Attributes:
        axis: name of the group's mesh axis, or "world".
        number: of the call on this group, from 1.
    """

    group: str
    axis: str
    ranks: tuple[int, ...]
    number: int

    def key(self, what: int | str) -> str:
        """Return where a rank leaves its fingerprint, or a key of all ranks.

        Those are "first" come, "unlike" some, "count" of them, "all" there.
        """
        return f"{self.group}/{self.number}/{what}"

    def __str__(self) -> str:
        where = f"{named(self.ranks)}; group {self.group}"
        return f"call {self.number} on {self.axis} ({where})"


class CollectiveCheck(Watch):
    """Compares the collectives that run inside `with CollectiveCheck(comm):`.

    Every rank of the job enters it at the same place of the program, and leaves it so.
    """

    def __init__(
        self,
        comm: Ranks,
        *,
        named: Mapping[str, torch.Tensor] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Prepare to compare.

        Args:
            comm: names the groups.
            named: tensors that calls may be about, such as the parameters of a model; their
                gradients are known too.
            limit_s: how long the ranks wait for one that does not come, in seconds.
        """
        super().__init__()
        self.phase_name = ""
        self._comm = comm
        self._axis_of = comm.axis_by_ranks()
        self._named = dict(named or {})
        self._numbers: Counter[str] = Counter()
        self._telling = ExitStack()
        self._words = Words(limit_s)
        self._messages = Messages(self._words)
        self._store = self._words.store
        self._rank = self._words.rank

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
                raise  # else the error propagates, and matters more
        finally:
            self._telling.close()
            super().__exit__(kind, error, trace)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare the operator if it is a collective, and run it."""
        call = read_call(func, args, kwargs)
        if call is not None and len(call.ranks) > 1:
            with self._words.held():
                self._check(call)
        return func(*args, **kwargs)

    def _check(self, call: Call) -> None:
        places, module = find_places(inspect.currentframe())
        if call.op == "recv_any_source":
            self._messages.receive_any(call)
            return
        tensor = module or self._name_of(call)
        fingerprint = take(call, tensor=tensor, places=places, phase=self.phase_name)
        if call.op in ("send", "recv"):
            self._messages.pair(call, fingerprint)
        else:
            self._meet(call, fingerprint)

    # Collectives: all ranks of the group meet.

    def _meet(self, call: Call, fingerprint: Fingerprint) -> None:
        """Wait for the other ranks of the group, and compare."""
        group = call.group.group_name
        self._numbers[group] += 1
        axis = self._axis_of.get(call.ranks, "world")
        meeting = Meeting(group, axis, call.ranks, self._numbers[group])
        text = fingerprint.text()
        self._store.set(f"last/{self._rank}", json.dumps([text, str(meeting)]))
        self._store.set(meeting.key(self._rank), text)
        is_unlike = self._come(meeting, fingerprint)
        if meeting.number > 1:
            # All have come to this call, so all have read what was said at the one before.
            self._forget(dataclasses.replace(meeting, number=meeting.number - 1))
        if not is_unlike:
            return
        texts = self._store.multi_get([meeting.key(rank) for rank in call.ranks])
        calls = {r: Fingerprint.read(t) for r, t in zip(call.ranks, texts, strict=True)}
        if found := difference(calls, self._has_name):
            one, other, what = found
            raise self._words.verdict(
                f"ranks {one} and {other} differ at {meeting}, in the {what}\n"
                f"{described(one, calls[one])}\n{described(other, calls[other])}\n"
                "Each rank of a group must make the same calls in the same order."
            )

    def _come(self, meeting: Meeting, fingerprint: Fingerprint) -> bool:
        """Wait until all ranks have come to a call; return whether their calls must be compared."""
        store, text = self._store, fingerprint.text()
        first = store.compare_set(meeting.key("first"), "", text).decode()
        if first != text or not fingerprint.is_even:
            store.set(meeting.key("unlike"), "")
        if store.add(meeting.key("count"), 1) == len(meeting.ranks):
            is_unlike = store.check([meeting.key("unlike")])
            store.set(meeting.key("all"), "unlike" if is_unlike else "alike")
            return is_unlike
        self._wait(meeting, fingerprint)
        return store.get(meeting.key("all")) == b"unlike"

    def _forget(self, meeting: Meeting) -> None:
        """Remove what this rank, and the first of the group for all, left at a call."""
        self._store.delete_key(meeting.key(self._rank))
        if self._rank == meeting.ranks[0]:
            for what in ("first", "unlike", "count", "all"):
                self._store.delete_key(meeting.key(what))

    def _wait(self, meeting: Meeting, fingerprint: Fingerprint) -> None:
        """Return when all ranks have come to a call."""
        waits = f"{described(self._rank, fingerprint)}\n{'':10}waits there, {meeting}"

        def look(waited_s: float) -> None:
            missing = self._missing(meeting)
            self._look(meeting, missing, waited_s)
            self._words.refuse_deadlock(
                [Edge(rank, meeting.key(rank), False) for rank in missing], waits
            )

        # The store answers all ranks: the more they are, the less often each may ask.
        longest_s = 2e-3 * max(1.0, len(meeting.ranks) / 8)
        try:
            self._words.poll(lambda: self._store.check([meeting.key("all")]), look, longest_s)
        except CollectiveMismatch:
            # A rank that comes later must not be the last, and run the collective.
            self._store.add(meeting.key("count"), -1)
            self._store.delete_key(meeting.key(self._rank))
            raise

    def _look(self, meeting: Meeting, missing: list[int], waited_s: float) -> None:
        """Find out why ranks have not come, and raise if they never will."""
        why, advice = "", ""
        for rank in missing:
            end = self._words.read(f"gone/{rank}")
            if end == LEFT:
                why = f"rank {rank} has left, without an error, and will not come to {meeting}"
                advice = "\nEach rank must make the same number of calls."
                break
            if end is not None and waited_s > min(GRACE_S, self._words.limit_s):
                why = f"rank {rank} has ended by {end} and will not come to {meeting}"
                break
        if missing and not why and waited_s > self._words.limit_s:
            why = f"{named(missing)} did not come to {meeting} within {self._words.limit_s:g} s"
        if why:
            raise self._words.verdict(f"{why}\n{self._scene(meeting, missing)}{advice}")

    def _missing(self, meeting: Meeting) -> list[int]:
        """Return the ranks that have not come to a call; they are few, so halves are asked for."""
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
        return missing

    def _scene(self, meeting: Meeting, missing: list[int]) -> str:
        """Describe what a rank waits in, and the last call of each that it waits for."""
        here = next(rank for rank in meeting.ranks if rank not in missing)
        others = [rank for rank in meeting.ranks if rank not in (here, *missing)]
        too = f", as {'does' if len(others) == 1 else 'do'} {named(others)}" if others else ""
        lines: list[str] = []
        for rank in (here, *missing):
            if (text := self._words.read(f"last/{rank}")) is None:
                lines.append(f"  rank {rank}: has made no call yet")
                continue
            call, which = json.loads(text)
            how = f"was its last call{which and ', '}{which}"
            if rank == here:
                how = f"waits there{too}"
            lines.append(f"{described(rank, Fingerprint.read(call))}\n{'':10}{how}")
        return "\n".join(lines)

    # Names of tensors.

    def _name_of(self, call: Call) -> str:
        """Return the name of the tensor that a call is about, or of the first in its buffer."""
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
