"""Requests from a worker to its servers and its scheduler.

An unanswered request is retried at the shard's current primary. Requests are idempotent: a server
may receive and answer one twice, and the second changes nothing.

[Note: Sent again] Weights may take long over a slow link, and resending them doubles that time. So
a worker first queries the same server: messages of a connection arrive in order, so the answer
"resend" shows that the request, or its answer, is lost.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import zmq

from phalanx.comm.waits import declared
from phalanx.errors import TrainingError
from phalanx.launch.failure import report
from phalanx.server.consistency import Consistency
from phalanx.server.heartbeats import HeartbeatThread
from phalanx.server.loop_clock import LoopClock
from phalanx.server.message import PROTOCOL, WireMessage
from phalanx.server.role import SILENT_S, Settings
from phalanx.server.secret import Secret
from phalanx.server.tasks import LEASE_S
from phalanx.server.unanswered import JobStopped, ended, known_so_far, lost, report_late, unanswered
from phalanx.server.wire import Connection

AGAIN_S: Final = 0.5
"""Time before the first retry of a request, in seconds; it doubles with each retry."""

LONGEST_AGAIN_S: Final = 4.0

LATE_S: Final = 20.0
"""Time a worker waits for other workers before it reports their names, in seconds; it doubles with
each report."""

UNREPLICATED_LOSS_S: Final = 5 * LEASE_S
"""Time a server without a backup may be lost before the job ends, in seconds; the server may come
back, because it was stopped or disconnected."""

SCHEDULER: Final = -1
"""Shard number that stands for the scheduler."""

ASK_MAP: Final = WireMessage("map")


@dataclass(frozen=True)
class JobAddress:
    """The address and secret with which a job's processes find each other.

    Attributes:
        coordinator: address of the coordinator.
        secret: secret of the job.
    """

    coordinator: str
    secret: Secret

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes of the job are on this host, started by `phalanx train`."""
        return self.coordinator.startswith("ipc://")


@dataclass
class _Asked:
    """An unanswered request."""

    shard: int
    message: WireMessage
    address: str = ""
    sent_s: float = 0.0
    again_s: float = field(default_factory=lambda: AGAIN_S)


def _are_of_others(waiting: Iterable[_Asked]) -> bool:
    """Return whether all waiting requests are answered when other workers push."""
    return all(each.message.kind == "totals" for each in waiting)


def _is_met(known: Settings, address: str) -> bool:
    """Return whether the map of the coordinator at `address` has its servers and a scheduler.

    Raises:
        TrainingError: the job has ended, or its messages have another version.
    """
    version = known.get("protocol", 2)  # maps of version 2 may lack it
    if known["epoch"] >= 0 and version != PROTOCOL:
        raise TrainingError(
            f"the coordinator at {address} has version {version} of the message protocol, but this "
            f"worker has version {PROTOCOL}; install the same version of phalanx on all hosts"
        )
    if known.get("ended"):
        raise ended(address)
    return bool(known["holders"] and known["scheduler"])


def holder(known: Settings, shard: int) -> str:
    """Return the address of a shard's primary, or of the scheduler; "" if there is none."""
    if shard == SCHEDULER:
        return known["scheduler"]
    return known["addresses"].get(known["holders"][shard][0], "")


def _check_lost(shard: int, known: Settings, gone_s: dict[int, float], now_s: float) -> None:
    """Raise an error if a shard without a backup has had no primary for UNREPLICATED_LOSS_S."""
    is_gone = known["holders"][shard][0] not in known["addresses"]
    if is_gone and now_s - gone_s.setdefault(shard, now_s) > UNREPLICATED_LOSS_S:
        raise lost(known, shard)


class Requests:
    """A worker's connections to the coordinator, the scheduler and the servers.

    Attributes:
        worker: number of this worker.
        consistency: consistency model of the job.
        map: latest map from the coordinator.
        num_live: number of live workers, as the scheduler last reported.
    """

    def __init__(
        self,
        meeting: JobAddress,
        worker: int,
        consistency: Consistency,
        tasks: tuple[int, int],
        timeout_s: float = 600.0,
    ) -> None:
        """Connect, and wait until the job has its servers and a scheduler.

        Args:
            meeting: address of the coordinator.
            worker: number of this worker.
            consistency: consistency model of the job.
            tasks: first clock of the job's tasks, and the clock after the last.
            timeout_s: longest wait for an answer, without time in which this process is stopped.
        """
        self.worker, self.consistency = worker, consistency
        self._meeting, self._timeout_s = meeting, timeout_s
        self._own = {
            "worker": worker,
            "tasks": [consistency.num_slots, *tasks],
            "is_open": consistency.is_asynchronous,
        }
        self._clock = LoopClock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._numbers = itertools.count(1)
        self._links: dict[str, Connection] = {}
        self._due = set[int]()
        self._inbox: dict[int, WireMessage] = {}
        self._known = set[int]()
        self._gone_s: dict[int, float] = {}
        self._coordinator = self._link(meeting.coordinator)
        self._asked_map_s = 0.0
        self.map: Settings = {"epoch": -1, "term": 0, "homes": {}, "holders": [], "scheduler": ""}
        self.num_live = consistency.num_slots
        try:
            self._wait_for(lambda: _is_met(self.map, meeting.coordinator), "the servers")
        except BaseException:
            self._unlink_all()
            raise
        beat = WireMessage("beat", self._own)
        self._stop_signal, self._is_leaving = 0, False
        self._beats = HeartbeatThread(
            meeting.secret, report, beat, lambda: self.map["scheduler"], self._hear_of_stop
        )

    def _hear_of_stop(self, answer: WireMessage) -> None:
        """Store the signal by which worker 0 ended the job; called by the heartbeat thread."""
        if self.worker > 0 and not self._is_leaving:
            self._stop_signal = int(answer.fields.get("stop_signal", 0))

    @property
    def num_shards(self) -> int:
        """Number of shards of the weights."""
        return len(self.map["holders"])

    def ask_scheduler(self, kind: str, **fields: Any) -> WireMessage:
        """Send a request to the scheduler; return its answer, and update `num_live`.

        With an asynchronous kind, a change of `num_live` is sent to the servers.
        """
        asked = WireMessage(kind, {**self._own, **fields})
        reply = self.ask({SCHEDULER: asked})[SCHEDULER]
        before, self.num_live = self.num_live, int(reply["num_live"])
        if self.num_live != before and self.consistency.is_asynchronous:
            live = WireMessage("live", {"num_live": self.num_live})
            self.ask(dict.fromkeys(range(self.num_shards), live))
        return reply

    def leave(self) -> None:
        """Notify the scheduler that this worker takes no more steps."""
        self._is_leaving, self._stop_signal = True, 0
        self.ask_scheduler("leave")

    def end(self) -> None:
        """End the job, so that all its roles exit."""
        self._asked_map_s = 0.0  # so that the request is sent immediately
        asked = WireMessage("end", {"q": next(self._numbers)})
        self._wait_for(lambda: bool(self.map.get("ended")), "the coordinator", asked)

    def close(self) -> None:
        """Stop the heartbeats, and close the connections."""
        self._beats.close()
        self._unlink_all()

    def _unlink_all(self) -> None:
        for link in self._links.values():
            link.close()
        self._context.destroy(linger=200)

    @declared(is_limited=True)
    def ask(
        self, asked: Mapping[int, WireMessage], idle: Callable[[], None] | None = None
    ) -> dict[int, WireMessage]:
        """Send requests, one per shard; return the answers, and call `idle` while waiting.

        Raises:
            JobStopped: a signal to worker 0 has ended the job, so answers may never arrive.
            TrainingError: a request is refused, or times out, or its shard is lost.
        """
        self._heed_stop()
        waiting: dict[int, _Asked] = {}
        for shard, message in asked.items():
            number = next(self._numbers)
            fields = {**message.fields, "q": number, "shard": shard}
            fields["is_known"] = shard in self._known
            waiting[number] = _Asked(shard, WireMessage(message.kind, fields, message.tensors))
        found: dict[int, WireMessage] = {}
        self._due |= waiting.keys()
        # On one host launch/heartbeat_monitor.py watches all workers.
        patience_s = math.inf if self._meeting.is_on_one_host else LATE_S
        begin_s = self._clock.now_s
        until_s = begin_s + self._timeout_s
        for each in waiting.values():
            self._send(each)
        while waiting:
            self._hear()
            for number in [number for number in waiting if number in self._inbox]:
                self._process_answer(number, waiting, found)
            self._retry_unanswered(waiting)
            if idle is not None and waiting:
                idle()
            if self._clock.now_s - begin_s > patience_s and _are_of_others(waiting.values()):
                report_late(self.worker, dict(self.ask_scheduler("stats")["late"]), patience_s)
                patience_s *= 2
            if waiting:
                self._heed_stop()
            if self._clock.now_s > until_s:
                kinds = (each.message.kind for each in waiting.values())
                raise unanswered(self.worker, kinds, self._timeout_s)
        return found

    def _heed_stop(self) -> None:
        """Raise JobStopped if a signal has ended the job and this worker has not left it."""
        if self._stop_signal and not self._is_leaving:
            raise JobStopped(self._stop_signal)

    def _process_answer(
        self, number: int, waiting: dict[int, _Asked], found: dict[int, WireMessage]
    ) -> None:
        """Process an answer: store it in `found`, or retry if it is "moved" or "resend"."""
        reply, each = self._inbox.pop(number), waiting[number]
        if reply.kind == "refused":
            raise TrainingError(f"a server refuses '{each.message.kind}': {reply['why']}")
        if reply.kind == "empty":
            raise lost(self.map, each.shard)
        if reply.kind == "moved":
            self._ask_map()
            each.sent_s, each.again_s = time.monotonic(), AGAIN_S / 5
            return
        if reply.kind == "resend":
            self._send(each)
            return
        del waiting[number]
        self._due.remove(number)
        found[each.shard] = reply
        self._known.add(each.shard)

    def _retry_unanswered(self, waiting: dict[int, _Asked]) -> None:
        """Retry requests that are unanswered for `again_s`, and refresh the map."""
        now_s = time.monotonic()
        for each in waiting.values():
            if now_s - each.sent_s > each.again_s:
                each.again_s = min(LONGEST_AGAIN_S, 2 * each.again_s)
                self._send_again(each)
        if waiting and now_s - self._asked_map_s > AGAIN_S:
            epoch = self.map["epoch"]
            self._ask_map()
            self._hear()
            if self.map["epoch"] != epoch:
                for each in waiting.values():
                    if each.address != holder(self.map, each.shard):
                        self._send(each)
            for each in waiting.values():
                if each.shard != SCHEDULER:
                    _check_lost(each.shard, self.map, self._gone_s, self._clock.now_s)

    def _send(self, each: _Asked) -> None:
        each.sent_s, each.address = time.monotonic(), holder(self.map, each.shard)
        if each.address:
            self._link(each.address).send(each.message)

    def _send_again(self, each: _Asked) -> None:
        """Query whether a server has received a request, see [Note: Sent again]."""
        if each.shard == SCHEDULER or each.address != holder(self.map, each.shard):
            self._send(each)
        elif each.address:
            each.sent_s = time.monotonic()
            fields = {name: each.message.fields[name] for name in ("q", "shard")}
            self._link(each.address).send(WireMessage("again", fields))

    def _link(self, address: str) -> Connection:
        if address not in self._links:
            link = Connection(self._context, self._meeting.secret, address, report)
            self._links[address] = link
            self._poller.register(link.socket, zmq.POLLIN)
        return self._links[address]

    def _ask_map(self, asked: WireMessage = ASK_MAP) -> None:
        self._asked_map_s = time.monotonic()
        self._coordinator.send(asked)

    def _hear(self, limit_s: float = 0.02) -> None:
        self._poller.poll(round(limit_s * 1000))
        self._clock.look()
        for message in [each for link in self._links.values() for each in link.receive()]:
            if message.kind == "map":
                self._take(dict(message.fields))
            elif (number := message.fields.get("q")) in self._due:
                if message.kind != "resend" or number not in self._inbox:
                    self._inbox[number] = message

    def _take(self, found: Settings) -> None:
        """Store a later map; close connections to addresses that are no longer in it."""
        if (found["term"], found["epoch"]) <= (self.map["term"], self.map["epoch"]):
            return
        self.map = found
        self._gone_s = {s: at_s for s, at_s in self._gone_s.items() if not holder(found, s)}
        live = {self._coordinator.address, self.map["scheduler"], *self.map["addresses"].values()}
        for address in self._links.keys() - live:
            link = self._links.pop(address)
            self._poller.unregister(link.socket)
            link.close()

    @declared(is_limited=True)
    def _wait_for(self, is_so: Callable[[], bool], whom: str, asked: WireMessage = ASK_MAP) -> None:
        """Send `asked` to the coordinator, which answers with its map, until `is_so()`."""
        reported_s = self._clock.now_s
        until_s = reported_s + self._timeout_s
        while not is_so():
            if time.monotonic() - self._asked_map_s > AGAIN_S / 2:
                self._ask_map(asked)
            self._hear()
            known = known_so_far(self.map, self._coordinator.address)
            if self._clock.now_s - reported_s > SILENT_S:
                reported_s = self._clock.now_s
                report(f"worker {self.worker} waits for {whom}: {known}")
            if self._clock.now_s > until_s:
                raise TrainingError(f"worker {self.worker} has waited in vain for {whom}: {known}")
