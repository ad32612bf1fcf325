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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import zmq

from phalanx.comm.waits import declared
from phalanx.errors import TrainingError
from phalanx.launch.failure import report
from phalanx.launch.interface import is_here
from phalanx.launch.lease import ListeningClock
from phalanx.server.consistency import Consistency
from phalanx.server.liveness import LEASE_S, LOOP_S, RESEND_S, HeartbeatThread
from phalanx.server.message import WireMessage
from phalanx.server.message_table import PROTOCOL
from phalanx.server.role import SILENT_S, Settings, no_answer
from phalanx.server.secret import Secret
from phalanx.server.wire import KEYLESS, Connection, Log

MOST_RESEND_S: Final = 4.0
"""Longest time between two retries of a request, in seconds; it begins with RESEND_S, and doubles
with each retry."""

LATE_S: Final = 20.0
"""Time a worker waits for other workers before it reports their names, in seconds; it doubles with
each report."""

UNREPLICATED_LOSS_S: Final = 5 * LEASE_S
"""Time a server without a backup may be lost before the job ends, in seconds; the server may come
back, because it was stopped or disconnected."""

SCHEDULER: Final = -1
"""Shard number that stands for the scheduler of the worker's group."""

COORDINATOR: Final = -2
"""Shard number that stands for the coordinator."""

ASK_MAP: Final = WireMessage("map")


class JobStopped(TrainingError):
    """A signal to worker 0 has ended the job."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"worker 0 has ended the job, by signal {signum}")


class JobEnded(TrainingError):
    """The job has ended, without a worker that starts, or that waits for a lost scheduler."""


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
    resend_s: float = field(default_factory=lambda: RESEND_S)


class Requests:
    """A worker's connections to the coordinator, the scheduler and the servers.

    Attributes:
        worker: number of this worker.
        group: number of its group.
        identity: fields of each message to the scheduler.
        map: latest map from the coordinator.
        is_leaving: whether this worker takes no more steps, so that no signal stops it.
    """

    def __init__(
        self, meeting: JobAddress, worker: int, consistency: Consistency, tasks: tuple[int, int],
        timeout_s: float = 600.0, log: Log = lambda _: None,
    ) -> None:  # fmt: skip
        """Connect, and wait until the job has its servers and the scheduler of each group.

        Groups are runs of workers, of equally many or one more; but a worker on a host with
        schedulers is of the group of one of these.

        Args:
            meeting: address of the coordinator.
            worker: number of this worker.
            consistency: consistency model of the job.
            tasks: first clock of the job's tasks, and the clock after the last.
            timeout_s: longest wait for an answer, without time in which this process is stopped.
            log: function that records connections, and messages that cannot be read.
        """
        self.worker, self.is_leaving, self._stop_signal = worker, False, 0
        self._meeting, self._timeout_s, self._log = meeting, timeout_s, log
        self.identity: Settings = {
            "worker": worker,
            "tasks": [consistency.num_slots, *tasks],
            "is_open": consistency.is_asynchronous,
        }
        self._clock = ListeningClock(LOOP_S)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._numbers = itertools.count(1)
        self._links: dict[str, Connection] = {}
        self._waiting: dict[int, _Asked] = {}
        self._inbox: dict[int, WireMessage] = {}
        self._known = set[int]()
        self._gone_s: dict[int, float] = {}
        self._coordinator = self._link(meeting.coordinator)
        self._asked_map_s = 0.0
        self.map: Settings = {"epoch": -1, "term": 0, "homes": {}, "holders": [], "groups": []}
        try:
            self._wait_for(self._is_met, "the servers")
        except BaseException:
            self._unlink_all()
            raise
        schedulers = [each["scheduler"] for each in self.map["groups"]]
        due = worker * len(schedulers) // consistency.num_slots
        here = [
            group
            for group, address in enumerate(schedulers)
            if address.startswith(KEYLESS) or is_here(str(urlsplit(address).hostname))
        ]
        self.group = min(here or [due], key=lambda group: abs(group - due))
        beat = WireMessage("beat", self.identity)
        self._beats = HeartbeatThread(
            meeting.secret, log, beat, lambda: self._holder(SCHEDULER), self._hear_of_stop
        )

    def _is_met(self) -> bool:
        """Return whether the map has the job's servers and schedulers.

        Raises:
            TrainingError: the job has ended, or its messages have another version.
        """
        address, version = self._coordinator.address, self.map.get("protocol", 2)
        if self.map["epoch"] >= 0 and version != PROTOCOL:  # maps of version 2 may lack it
            raise TrainingError(
                f"the coordinator at {address} has version {version} of the message protocol, but "
                f"this worker has version {PROTOCOL}; install the same version of phalanx on all "
                "hosts"
            )
        self._check_ended()
        return bool(self.map["holders"]) and all(each["scheduler"] for each in self.map["groups"])

    def _check_ended(self) -> None:
        if self.map.get("ended"):
            raise JobEnded(
                f"the job of the coordinator at {self._coordinator.address} has ended; a new job "
                "needs a coordinator with a new journal"
            )

    def _hear_of_stop(self, reply: WireMessage) -> None:
        """Store the signal by which worker 0 ended the job; called by the heartbeat thread."""
        if self.worker > 0:
            self._stop_signal = int(reply.fields.get("stop_signal", 0))

    @property
    def num_shards(self) -> int:
        """Number of shards of the weights."""
        return len(self.map["holders"])

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
            JobEnded: the job has ended, without this worker, whose scheduler may be lost.
            TrainingError: a request is refused, or times out, or its shard is lost.
        """
        self._check_stop()
        due: dict[int, _Asked] = {}
        for shard, message in asked.items():
            number = next(self._numbers)
            more = {"q": number, "shard": shard, "is_known": shard in self._known}
            request = WireMessage(message.kind, {**message.fields, **more}, message.tensors)
            due[number] = _Asked(shard, request)
        self._waiting |= due
        answers: dict[int, WireMessage] = {}
        # On one host launch/heartbeat_monitor.py watches all workers.
        patience_s = math.inf if self._meeting.is_on_one_host else LATE_S
        begin_s = self._clock.now_s
        try:
            for each in due.values():
                self._send(each)
            while due:
                self._hear()
                for number in [number for number in due if number in self._inbox]:
                    reply = self._inbox.pop(number)
                    if self._is_answer(due[number], reply):
                        answers[due.pop(number).shard] = reply
                        del self._waiting[number]
                self._retry(due)
                if not due:
                    break
                self._check_ended()
                if idle is not None:
                    idle()
                waited_s = self._clock.now_s - begin_s
                kinds = {each.message.kind for each in due.values()}
                if waited_s > patience_s and kinds == {"totals"}:  # other workers have to push
                    self._report_late(patience_s)
                    patience_s *= 2
                self._check_stop()
                if waited_s > self._timeout_s:
                    raise TrainingError(
                        f"worker {self.worker} has waited {self._timeout_s:g} s for an answer to "
                        f"{', '.join(sorted(kinds))}; see the log of the servers"
                    )
        finally:
            for number in due:
                del self._waiting[number]
                self._inbox.pop(number, None)
        return answers

    def _check_stop(self) -> None:
        """Raise JobStopped if a signal has ended the job and this worker has not left it."""
        if self._stop_signal and not self.is_leaving:
            raise JobStopped(self._stop_signal)

    def _report_late(self, for_s: float) -> None:
        """Report the live workers whose tasks this worker has waited for."""
        (reply,) = self.ask({SCHEDULER: WireMessage("stats", self.identity)}).values()
        for other, clock in reply["late"]:
            if other != self.worker:
                report(
                    f"worker {self.worker} has waited {for_s:g} s for push {clock + 1} of worker "
                    f"{other}, whose process is alive: that worker or a server is slow, is saving, "
                    "or hangs"
                )

    def _is_answer(self, each: _Asked, reply: WireMessage) -> bool:
        """Return whether a reply answers a request; send the request again if it has to be.

        Raises:
            TrainingError: the request is refused, or its shard is lost.
        """
        match reply.kind:
            case "refused":
                raise TrainingError(f"a server refuses '{each.message.kind}': {reply['why']}")
            case "empty":
                raise self._lost(each.shard)
            case "moved":
                self._ask_map()
                each.sent_s, each.resend_s = time.monotonic(), RESEND_S / 5
            case "resend":
                self._send(each)
            case _:
                self._known.add(each.shard)
                return True
        return False

    def _lost(self, shard: int) -> TrainingError:
        """Return the error for a shard that was lost with its last copy."""
        why = "no other server had a full copy; resume from the last checkpoint; with "
        why += "--server.num-servers 2 or more, another server keeps a copy"
        if self.num_shards > 1:
            why = "the server with a copy was lost, too, or had not received all of it yet; "
            why += "resume from the last checkpoint"
        holder = self.map["holders"][shard][0]
        return TrainingError(f"{holder} was lost with its part of the weights, and {why}")

    def _retry(self, due: Mapping[int, _Asked]) -> None:
        """Retry requests that are unanswered for `resend_s`, and refresh the map."""
        # An unanswered request, whose server answers nothing or has been replaced:
        #
        #     0 s      push (q 7) -> server a
        #     0.5 s    again (q 7) -> a                   "resend" if a lacks it, then push again
        #     1.5 s    again (q 7) -> a                   the pause doubles, up to MOST_RESEND_S
        #     lease    the map now has b                  push (q 7) -> b, which acknowledges a task
        #                                                 that it already has
        now_s = time.monotonic()
        for each in due.values():
            if now_s - each.sent_s > each.resend_s:
                each.resend_s = min(MOST_RESEND_S, 2 * each.resend_s)
                if each.shard < 0 or each.address != self._holder(each.shard):
                    self._send(each)
                elif each.address:  # query whether the server has it, see [Note: Sent again]
                    each.sent_s = time.monotonic()
                    fields = {name: each.message.fields[name] for name in ("q", "shard")}
                    self._link(each.address).send(WireMessage("again", fields))
        if due and now_s - self._asked_map_s > RESEND_S:
            epoch = self.map["epoch"]
            self._ask_map()
            self._hear()
            if self.map["epoch"] != epoch:
                for each in due.values():
                    if each.address != self._holder(each.shard):
                        self._send(each)
            for shard in {each.shard for each in due.values() if each.shard >= 0}:
                self._check_lost(shard)

    def _check_lost(self, shard: int) -> None:
        """Raise an error if a shard without a backup has had no primary for a long time."""
        now_s = self._clock.now_s
        is_gone = self.map["holders"][shard][0] not in self.map["addresses"]
        if is_gone and now_s - self._gone_s.setdefault(shard, now_s) > UNREPLICATED_LOSS_S:
            raise self._lost(shard)

    def _holder(self, shard: int) -> str:
        """Return the address of a shard's primary, or of the role that a number stands for.

        The result is "" if a shard has no primary.
        """
        if shard == COORDINATOR:
            return self._coordinator.address
        if shard == SCHEDULER:
            return self.map["groups"][self.group]["scheduler"]
        return self.map["addresses"].get(self.map["holders"][shard][0], "")

    def _send(self, each: _Asked) -> None:
        each.sent_s, each.address = time.monotonic(), self._holder(each.shard)
        if each.address:
            self._link(each.address).send(each.message)

    def _link(self, address: str) -> Connection:
        if address not in self._links:
            link = Connection(self._context, self._meeting.secret, address, self._log)
            self._links[address] = link
            self._poller.register(link.socket, zmq.POLLIN)
        return self._links[address]

    def _ask_map(self, asked: WireMessage = ASK_MAP) -> None:
        self._asked_map_s = time.monotonic()
        self._coordinator.send(asked)

    def _hear(self, limit_s: float = 0.02) -> None:
        self._poller.poll(round(limit_s * 1000))
        self._clock.tick()
        for message in [each for link in self._links.values() for each in link.receive()]:
            if message.kind == "map":
                self._take(dict(message.fields))
            elif (number := message.fields.get("q")) in self._waiting:
                if message.kind != "resend" or number not in self._inbox:
                    self._inbox[number] = message

    def _take(self, later: Settings) -> None:
        """Store a later map; close connections to addresses that are no longer in it."""
        if (later["term"], later["epoch"]) <= (self.map["term"], self.map["epoch"]):
            return
        self.map = later
        self._gone_s = {s: at_s for s, at_s in self._gone_s.items() if not self._holder(s)}
        schedulers = {each["scheduler"] for each in later["groups"]}
        live = {self._coordinator.address, *schedulers, *later["addresses"].values()}
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
            if time.monotonic() - self._asked_map_s > RESEND_S / 2:
                self._ask_map(asked)
            self._hear()
            known, groups = no_answer(self._coordinator.address), self.map["groups"]
            if self.map["epoch"] >= 0:
                known = (
                    f"the coordinator at {self._coordinator.address} has registered "
                    f"{len(self.map.get('addresses', ()))} of its servers and "
                    f"{sum(bool(each['scheduler']) for each in groups)} of its {len(groups)} "
                    "schedulers"
                )
            if self._clock.now_s - reported_s > SILENT_S:
                reported_s = self._clock.now_s
                report(f"worker {self.worker} waits for {whom}: {known}")
            if self._clock.now_s > until_s:
                raise TrainingError(f"worker {self.worker} has waited in vain for {whom}: {known}")
