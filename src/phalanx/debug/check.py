"""Compare each collective with those of the other ranks before it runs (`--debug-comm`).

    rank 0  ──> store: group, number, fingerprint ──┐  all there:     alike    run the collective
    rank 1  ──> store: group, number, fingerprint ──┤                 unlike   the same error on all
    rank 2  ──> not there ──────────────────────────┘  say where it is, and what the others wait in

The first to come leaves its fingerprint for the others to compare with, and the last, who is known
by a count, lets all go on: a rank makes as many calls to the store in a group of any size. Only
where one differs, or ranks give and take unlike shapes, each reads what all others said.

A `CollectiveCheck` is a dispatch mode, so it belongs to the thread that entered it, and to the
threads of autograd that work for it: the collectives of any other thread pass unseen. The ranks
meet at each call, even of an asynchronous collective; all must make their calls in one order,
across groups too.

A send and its receive are compared when the second of them is called, without a meeting. What a
rank is to receive of one that has left is told by the later of the two.

A rank that waits for long says for whom, in a call or, by `Comm`, for a message. Ranks that wait
for each other in a cycle never go on, and are told so.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.comm.calls import Call, axes_by_ranks, read_call
from phalanx.comm.join import job_store
from phalanx.comm.waits import told_to
from phalanx.comm.watch import Watch
from phalanx.debug.deadlock import Edge, WaitGraph
from phalanx.debug.fingerprint import Fingerprint, difference, find_places, pair_difference, take
from phalanx.errors import CollectiveMismatch, named

LIMIT_S = 30.0
"""How long a rank waits for the others to come to a call."""

LOOK_S = 0.25
"""How long a rank waits before it looks, again and again, where the others are."""

GRACE_S = 5.0
"""How long a rank waits for one that an error of its own has ended, and which is to say so."""

LEFT = "left"


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
    """Compares the collectives that run inside `with CollectiveCheck(mesh):`.

    Every rank of the job enters it at the same place of the program, and leaves it so.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        named: Mapping[str, torch.Tensor] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Prepare to compare.

        Args:
            mesh: names the groups.
            named: tensors that calls may be about, such as the parameters of a model; their
                gradients are known too.
            limit_s: how long the ranks wait for one that does not come, in seconds.
        """
        super().__init__()
        self.limit_s = limit_s
        self._axis_of = axes_by_ranks(mesh)
        self._named = dict(named or {})
        self._rank = dist.get_rank()
        self.phase_name = ""
        self._numbers: Counter[str] = Counter()
        self._awaited: set[int] = set()
        # Address of what a message is to fill -> its sender, its key and this rank's call.
        self._receiving: dict[int, tuple[int, str, Fingerprint]] = {}
        self._telling = ExitStack()
        store = job_store()
        # Each rank counts its own, and all make the same: what an earlier check left, is not read.
        self._store = dist.PrefixStore(f"check/{store.add(f'checks/{self._rank}', 1)}", store)
        self._graph = WaitGraph(self._store, self._rank)

    @override
    def __enter__(self) -> Self:
        self._telling.enter_context(told_to(self._wait_for_message))
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
                self._leave()
        except dist.DistNetworkError:
            if error is None:
                raise  # else the error goes on, and matters more
        finally:
            self._telling.close()
            super().__exit__(kind, error, trace)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare the operator if it is a collective, and run it.

        Raises:
            CollectiveMismatch: the ranks do not call alike, or one does not come.
        """
        call = read_call(func, args, kwargs)
        if call is not None and len(call.ranks) > 1:
            with self._store_is_held():
                self._check(call)
        return func(*args, **kwargs)

    @contextmanager
    def _store_is_held(self) -> Generator[None]:
        """Say what it means that the store cannot be reached."""
        try:
            yield
        except dist.DistNetworkError as error:
            raise CollectiveMismatch(
                "the calls of the ranks cannot be compared any more: the process that holds "
                "the job's store (rank 0, or torchrun's own) has ended; its last words say why",
                self._rank,
            ) from error

    def _check(self, call: Call) -> None:
        places, module = find_places(inspect.currentframe())
        if call.op == "recv_any_source":
            # What it receives is not known; sends to this rank are no longer told to be wrong.
            self._store.set(self._any_source_key(call, self._rank), "")
            return
        tensor = module or self._name_of(call)
        fingerprint = take(call, tensor=tensor, places=places, phase=self.phase_name)
        if call.op in ("send", "recv"):
            self._pair(call, fingerprint)
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
            raise self._verdict(
                f"ranks {one} and {other} differ at {meeting}, in the {what}\n"
                f"{_told(one, calls[one])}\n{_told(other, calls[other])}\n"
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
        told = f"{_told(self._rank, fingerprint)}\n{'':10}waits there, {meeting}"

        def look(waited_s: float) -> None:
            missing = self._missing(meeting)
            self._look(meeting, missing, waited_s)
            self._refuse_deadlock([Edge(rank, meeting.key(rank), False) for rank in missing], told)

        # The store answers all ranks: the more they are, the less often each may ask.
        longest_s = 2e-3 * max(1.0, len(meeting.ranks) / 8)
        try:
            self._poll(lambda: self._store.check([meeting.key("all")]), look, longest_s)
        except CollectiveMismatch:
            # A rank that comes later must not be the last, and run the collective.
            self._store.add(meeting.key("count"), -1)
            self._store.delete_key(meeting.key(self._rank))
            raise

    def _poll(
        self, is_over: Callable[[], bool], look: Callable[[float], None], longest_s: float
    ) -> None:
        """Return when a wait is over; call `look` now and then, with the time that it has taken."""
        self._graph.begin()
        began_s = time.monotonic()
        look_s, pause_s = began_s + LOOK_S, 20e-6
        try:
            while not is_over():
                now_s = time.monotonic()
                if now_s > look_s:
                    if self._store.check(["verdict"]):
                        raise self._verdict("")
                    look(now_s - began_s)
                    look_s = now_s + LOOK_S
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        finally:
            self._graph.end()

    def _look(self, meeting: Meeting, missing: list[int], waited_s: float) -> None:
        """Find out why ranks have not come, and raise if they never will."""
        why, advice = "", ""
        for rank in missing:
            end = self._read(f"gone/{rank}")
            if end == LEFT:
                why = f"rank {rank} has left, without an error, and will not come to {meeting}"
                advice = "\nEach rank must make the same number of calls."
                break
            if end is not None and waited_s > min(GRACE_S, self.limit_s):
                why = f"rank {rank} has ended by {end} and will not come to {meeting}"
                break
        if missing and not why and waited_s > self.limit_s:
            why = f"{named(missing)} did not come to {meeting} within {self.limit_s:g} s"
        if why:
            raise self._verdict(f"{why}\n{self._scene(meeting, missing)}{advice}")

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

    def _refuse_deadlock(self, edges: Sequence[Edge], told: str) -> None:
        """Raise if one of those that this rank waits for waits for it in turn."""
        if cycle := self._graph.cycle(edges, told):
            lines = "\n".join(cycle.values())
            raise self._verdict(
                f"deadlock: {named(sorted(cycle))} wait for each other\n{lines}\n"
                "Ranks must come to their calls and messages in one order."
            )

    def _scene(self, meeting: Meeting, missing: list[int]) -> str:
        """Tell what a rank waits in, and the last call of each that it waits for."""
        here = next(rank for rank in meeting.ranks if rank not in missing)
        others = [rank for rank in meeting.ranks if rank not in (here, *missing)]
        too = f", as {'does' if len(others) == 1 else 'do'} {named(others)}" if others else ""
        lines: list[str] = []
        for rank in (here, *missing):
            if (text := self._read(f"last/{rank}")) is None:
                lines.append(f"  rank {rank}: has made no call yet")
                continue
            call, which = json.loads(text)
            how = f"was its last call{which and ', '}{which}"
            if rank == here:
                how = f"waits there{too}"
            lines.append(f"{_told(rank, Fingerprint.read(call))}\n{'':10}{how}")
        return "\n".join(lines)

    def _verdict(self, message: str) -> CollectiveMismatch:
        """Return the error that all ranks raise: the first that any of them found."""
        mine = json.dumps([message, self._rank])
        first, speaker = json.loads(self._store.compare_set("verdict", "", mine))
        return CollectiveMismatch(first, speaker)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    # Sends and receives: the second of a pair compares.

    def _pair(self, call: Call, fingerprint: Fingerprint) -> None:
        """Compare a send with its receive if the other rank has called before."""
        is_send = call.op == "send"
        peer = call.ranks[call.arguments["dst" if is_send else "src"]]
        sender, receiver = (self._rank, peer) if is_send else (peer, self._rank)
        line = f"{call.group.group_name}/{sender}-{receiver}/{call.arguments['tag']}"
        self._numbers[line] += 1
        text = fingerprint.text()
        self._store.set(f"last/{self._rank}", json.dumps([text, ""]))
        key = f"{line}/{self._numbers[line]}"
        theirs = self._store.compare_set(key, "", text).decode()
        if theirs == text:  # this rank is the first of the two
            if not is_send:
                if call.inputs[0].numel():
                    self._receiving[call.inputs[0].data_ptr()] = peer, key, fingerprint
                self._await(peer, key, fingerprint, self._numbers[line])
            return
        self._store.delete_key(key)
        other = Fingerprint.read(theirs)
        what = pair_difference(fingerprint, other)
        if what and not self._store.check([self._any_source_key(call, receiver)]):
            raise self._verdict(
                f"ranks {self._rank} and {peer} differ in message {self._numbers[line]} from rank "
                f"{sender} to rank {receiver}, in the {what}\n"
                f"{_told(self._rank, fingerprint)}\n{_told(peer, other)}"
            )

    def _await(self, sender: int, key: str, fingerprint: Fingerprint, number: int) -> None:
        """Say that this rank waits for a message, unless its sender has left already."""
        waits = f"it has not sent message {number} to rank {self._rank}"
        told = f"{_told(self._rank, fingerprint)}\n{'':10}waits for it"
        if sender not in self._awaited:
            self._awaited.add(sender)
            number = self._store.add(f"receivers/{sender}", 1)
            self._store.set(f"receivers/{sender}/{number}", str(self._rank))
        self._store.set(f"awaits/{sender}/{self._rank}", json.dumps([key, waits, told]))
        if self._read(f"gone/{sender}") == LEFT:
            raise self._unsent(sender, waits, told)

    @contextmanager
    def _wait_for_message(self, tensor: torch.Tensor | None) -> Generator[None]:
        """Wait for the sender of what a tensor is to receive, before this rank blocks for it."""
        address = None if tensor is None or not tensor.numel() else tensor.data_ptr()
        if address in self._receiving:
            self._wait_for_sender(*self._receiving.pop(address))
        yield

    def _wait_for_sender(self, sender: int, key: str, fingerprint: Fingerprint) -> None:
        """Return when a message is sent, or, as it may take its time, after the limit."""
        told = f"{_told(self._rank, fingerprint)}\n{'':10}waits for it, from rank {sender}"
        until_s = time.monotonic() + self.limit_s

        def look(waited_s: float) -> None:
            end = self._read(f"gone/{sender}")
            # Of one that has left, `_await` or its own `_leave` tells.
            if end not in (None, LEFT) and waited_s > min(GRACE_S, self.limit_s):
                raise self._verdict(f"rank {sender} has ended by {end}, and sends no more\n{told}")
            self._refuse_deadlock([Edge(sender, key, True)], told)

        def is_over() -> bool:
            return not self._store.check([key]) or time.monotonic() > until_s

        with self._store_is_held():
            self._poll(is_over, look, 2e-3)

    def _leave(self) -> None:
        """Raise if another rank waits for a message of this one, which has left."""
        num_receivers = int(self._read(f"receivers/{self._rank}") or 0)
        for number in range(1, num_receivers + 1):
            receiver = self._read(f"receivers/{self._rank}/{number}")
            if text := self._read(f"awaits/{self._rank}/{receiver}"):
                key, waits, told = json.loads(text)
                if self._store.check([key]):  # else it was sent
                    raise self._unsent(self._rank, waits, told)

    def _unsent(self, sender: int, waits: str, told: str) -> CollectiveMismatch:
        last = f"  rank {sender}: has made no call yet"
        if (text := self._read(f"last/{sender}")) is not None:
            last = (
                f"{_told(sender, Fingerprint.read(json.loads(text)[0]))}\n{'':10}was its last call"
            )
        return self._verdict(
            f"rank {sender} has left, without an error, and {waits}\n{told}\n{last}\n"
            "Each rank must make the same number of calls."
        )

    def _any_source_key(self, call: Call, receiver: int) -> str:
        return f"any/{call.group.group_name}/{receiver}"

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


def _told(rank: int, call: Fingerprint) -> str:
    """Return a rank's call and its places in lines of a message."""
    places = ", called from ".join(call.places) or "a thread without a place in Python"
    return f"  rank {rank}: {call}\n{'':10}at {places}"
