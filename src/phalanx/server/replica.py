"""Primary-backup replication of shards: a backup has an operation before it is acknowledged.

A primary sends its backup each operation that changes a shard, in order; a new backup first gets a
copy of the shard. A backup refuses operations of an older epoch, so that a primary that has been
replaced without knowing it cannot acknowledge a request.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from typing_extensions import override

from phalanx.server.heartbeats import BEAT_S, HeartbeatThread
from phalanx.server.loop_clock import LoopClock
from phalanx.server.message import PROTOCOL, WireMessage
from phalanx.server.role import Member, Settings
from phalanx.server.shard import Shard
from phalanx.server.wire import Connection

AGAIN_S: Final = 1.0
"""Time after which a primary queries a backup about unacknowledged operations, in seconds, see
[Note: Sent again] in requests.py."""

STUCK_S: Final = 300.0
"""Time a server may spend on one message, in seconds, before it stops its heartbeats, so that its
backup becomes primary; by default a worker waits twice as long for an answer."""


@dataclass
class Backup:
    """The backup of a shard whose primary is this server.

    Attributes:
        name: name of the backup's server.
        since: epoch in which the server became the backup.
        link: connection to the server.
        index: index of the last operation that the server has reported; -1 before its first copy.
        sent: index -> operation after the last copy that the server has not acknowledged.
        sent_s: time of the last message to the server, by `time.monotonic`.
        waiting: (index of an operation, action to run once it is acknowledged), in order.
    """

    name: str
    since: int
    link: Connection
    index: int = -1
    sent: dict[int, WireMessage] = field(default_factory=dict[int, WireMessage])
    sent_s: float = 0.0
    waiting: deque[tuple[int, Callable[[], None]]] = field(
        default_factory=deque[tuple[int, Callable[[], None]]]
    )


class ReplicatedShards(Member):
    """A member that stores shards as a primary or as a backup.

    Attributes:
        shards: number -> shard that this server stores.
    """

    kind = "server"

    def __init__(self, job: str, *args: Any, weight: float = 1.0, **more: Any) -> None:
        super().__init__(*args, **more)
        self._job, self._weight = job, weight
        self._beat_clock, self._seen_s, self._seen_at_s = LoopClock(4 * BEAT_S), 0.0, 0.0
        self._is_stuck = False
        self.shards: dict[int, Shard] = {}
        self._backups: dict[int, Backup] = {}
        self._synced: dict[int, int] = {}  # shard backed up here -> epoch of its copy

    @override
    def facts(self) -> Settings:
        synced = sorted(self._synced.items())
        return {"job": self._job, "protocol": PROTOCOL, "weight": self._weight, "synced": synced}

    @override
    def run(self, stop: threading.Event | None = None) -> None:
        alive = WireMessage("alive", {"name": self.name, "incarnation": self.incarnation})
        beats = HeartbeatThread(self.secret, self.log, alive, self._beats_to)
        try:
            super().run(stop)
        finally:
            beats.close()

    def _beats_to(self) -> str:
        """Return the receiver of heartbeats: the coordinator, or "" while the loop is stuck."""
        self._beat_clock.look()
        begun_s, now_s = self._begun_s, self._beat_clock.now_s
        if begun_s != self._seen_s:
            self._seen_s, self._seen_at_s = begun_s, now_s
            self._is_stuck = False
        if not self._is_stuck and now_s - self._seen_at_s > STUCK_S:
            self._is_stuck = True
            self.log(
                f"at one message for {STUCK_S:g} s: heartbeats stop, so the coordinator declares "
                "this server lost"
            )
        return "" if self._is_stuck else self._coordinator.address

    # The map.

    @property
    def _holder(self) -> str:
        """The name of this server in the map's holders, or "" while another process has the name.

        So a process holds no shards while it waits for the name of a killed process, or if it
        resumes after another process got its name.
        """
        who = self.map.get("incarnations", {}).get(self.name, self.incarnation)
        return self.name if who == self.incarnation else ""

    @override
    def changed(self) -> None:
        # A copy of a later epoch belongs to a map that this server has not received.
        now = self.map["epoch"]
        self._synced = {s: e for s, e in self._synced.items() if e > now or self._counts(s, e)}
        for shard in list(self.shards):
            if self._holder not in self.map["holders"][shard] and shard not in self._synced:
                self.shards.pop(shard).close()
        for shard, names in enumerate(self.map["holders"]):
            due = names[1] if names[1:] and self.is_primary(shard) else None
            since = self.map["since"][shard]
            address = None if due is None else self.map["addresses"].get(due)
            held = self._backups.get(shard)
            if held is not None and (due, since) == (held.name, held.since):
                continue
            waiting = self._drop_backup(shard)
            if address is not None and due is not None:
                self._backups[shard] = Backup(due, since, self.link(address), waiting=waiting)
                self._copy(shard)
            elif self.is_primary(shard):  # else drop the actions: workers retry at the new primary
                for _, act in waiting:
                    act()

    def _counts(self, shard: int, epoch: int) -> bool:
        """Return whether a copy sent in `epoch` belongs to this server's current role as backup."""
        is_backup = self._holder in self.map["holders"][shard][1:]
        return is_backup and epoch >= self.map["since"][shard]

    def _drop_backup(self, shard: int) -> deque[tuple[int, Callable[[], None]]]:
        """Remove the backup of a shard, if any; return the actions that waited for it."""
        backup = self._backups.pop(shard, None)
        if backup is None:
            return deque()
        self.unlink(backup.link)
        return backup.waiting

    def _copy(self, number: int) -> None:
        """Send a copy of a shard to its backup."""
        backup, shard = self._backups[number], self.shards.get(number)
        backup.sent_s = time.monotonic()
        if shard is not None:
            state, tensors = shard.state()
            backup.sent.clear()
            fields = {"shard": number, "epoch": self.map["epoch"], "state": state}
            backup.link.send(WireMessage("copy", fields, tensors))

    def is_primary(self, number: int) -> bool:
        """Return whether this server is the primary of a shard.

        A server with a current copy is a backup, even if its own map, of an epoch before the copy,
        has it as primary: an operation of its own would give the copy an index of the primary's.
        """
        holders = self.map.get("holders", [])
        is_first = 0 <= number < len(holders) and holders[number][0] == self._holder
        return is_first and number not in self._synced

    # Replication.

    def begin(self, number: int) -> None:
        """Send a newly created shard to its backup, if there is one."""
        if number in self._backups:
            self._copy(number)

    @override
    def tick(self) -> None:
        super().tick()
        for shard in self.shards.values():
            if shard.memory is not None:
                shard.memory.touch()
        for number, backup in self._backups.items():
            if time.monotonic() - backup.sent_s > AGAIN_S:
                self._ask_again(number, backup)

    def change(self, number: int, op: str, fields: Settings, tensors: Any = ()) -> None:
        """Perform an operation on a shard, and send it to the backup.

        A new version is published once the backup has the operation.
        """
        shard = self.shards[number]
        before = shard.version
        perform(shard, op, fields, tensors)
        backup = self._backups.get(number)
        if backup is not None:
            more = {"shard": number, "epoch": self.map["epoch"], "index": shard.index, "op": op}
            message = WireMessage("op", {**more, "fields": fields}, tensors)
            backup.sent[shard.index] = message
            backup.sent_s = time.monotonic()
            backup.link.send(message)
        if shard.version > before and shard.memory is not None:
            self.after(number, functools.partial(shard.memory.publish, shard.version))

    def after(self, number: int, act: Callable[[], None]) -> None:
        """Call `act` once the backup has acknowledged all operations so far."""
        backup = self._backups.get(number)
        index = self.shards[number].index
        if backup is None or backup.index >= index:
            act()
        else:
            backup.waiting.append((index, act))

    def _ask_again(self, number: int, backup: Backup) -> None:
        backup.sent_s = time.monotonic()
        if number in self.shards and backup.index < self.shards[number].index:
            fields = {"shard": number, "epoch": self.map["epoch"]}
            fields["sent"] = self.shards[number].index
            backup.link.send(WireMessage("where", fields))

    @override
    def hear(self, link: Connection, message: WireMessage) -> None:
        super().hear(link, message)
        for number, backup in self._backups.items():
            if backup.link is link:
                self._handle_backup_report(number, backup, message)
                return

    def _handle_backup_report(self, number: int, backup: Backup, message: WireMessage) -> None:
        """Handle a backup's report on its copy: drop acknowledged operations, resend lost ones."""
        index = int(message.fields.get("index", -1))
        is_behind = message.kind == "at" and index < message["sent"]
        if message.kind == "gap" or (is_behind and index + 1 not in backup.sent):
            backup.index = -1  # operations were lost, or a new process has the name
            self._copy(number)
        elif message.kind in ("has", "at"):
            backup.index = max(index, backup.index)  # reports may arrive out of order
            for each in [each for each in backup.sent if each <= index]:
                del backup.sent[each]
            while backup.waiting and backup.waiting[0][0] <= index:
                backup.waiting.popleft()[1]()
            if is_behind:  # operations sent before the query and not received are lost
                for each in [each for each in backup.sent if each <= message["sent"]]:
                    backup.link.send(backup.sent[each])

    def handle_replication(self, peer: bytes, message: WireMessage) -> None:
        """Handle a primary's copy, operation or query, unless the primary has been replaced."""
        number, epoch = int(message["shard"]), int(message["epoch"])
        is_old = epoch < self._synced.get(number, 0)
        if is_old or (epoch <= self.map["epoch"] and not self._counts(number, epoch)):
            self.reply(peer, message, "fenced", shard=number)  # the sender's map is outdated
            return
        shard = self.shards.get(number)
        if message.kind == "where":
            if shard is None or number not in self._synced:
                self.reply(peer, message, "gap", shard=number)
            else:
                more = {"index": shard.index, "sent": message["sent"]}
                self.reply(peer, message, "at", shard=number, **more)
            return
        if message.kind == "copy":
            state = message["state"]
            if shard is None or shard.index <= state["index"] or number not in self._synced:
                if shard is not None:
                    shard.close()
                shard = self.shards[number] = Shard.of_state(state, message.tensors)
            self._synced[number] = epoch
        elif shard is None or number not in self._synced or int(message["index"]) > shard.index + 1:
            self.reply(peer, message, "gap", shard=number)
            return
        elif int(message["index"]) == shard.index + 1:
            perform(shard, str(message["op"]), message["fields"], list(message.tensors))
        self.reply(peer, message, "has", shard=number, index=shard.index)

    @override
    def close(self) -> None:
        for number in list(self._backups):
            self.unlink(self._backups.pop(number).link)
        for shard in self.shards.values():
            shard.close()
        super().close()


def perform(shard: Shard, op: str, fields: Settings, tensors: Any) -> None:
    """Perform an operation on a shard, identically on a primary and on its backup."""
    if op == "push":
        shard.push(fields, tensors)
    elif op == "apply":
        shard.apply(int(fields["version"]), fields["rate"], fields["scale"], fields.get("noted"))
    elif op == "lend":
        shard.lent[int(fields["slot"])] = list(tensors)
    elif op == "live":
        shard.num_workers = int(fields["num_live"])
    else:
        shard.apply_asynchronous()
    shard.index += 1
