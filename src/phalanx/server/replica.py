"""Primary-backup replication of shards: a backup has an operation before it is acknowledged.

A primary sends its backup each operation that changes a shard, in order; a new backup first gets a
copy of the shard. A backup fences operations of an older epoch, so that a primary that has been
replaced without knowing it cannot acknowledge a request.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.server.liveness import RESEND_S
from phalanx.server.message import WireMessage, answer
from phalanx.server.role import Membership, Role, Settings
from phalanx.server.shard import Shard
from phalanx.server.wire import Connection


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
    waiting: deque[tuple[int, Callable[[], None]]]
    index: int = -1
    sent: dict[int, WireMessage] = field(default_factory=dict[int, WireMessage])
    sent_s: float = 0.0


class ShardReplicas:
    """The shards that a server stores, each as its primary or as its backup.

    Attributes:
        shards: number -> shard.
        backups: number -> backup of a shard whose primary is this server.
        synced: number of a shard that is backed up here -> epoch of its copy.
    """

    def __init__(self, role: Role, member: Membership) -> None:
        """Store no shards; `role` is the server, and `member` has the map."""
        self._role, self._member = role, member
        self.shards: dict[int, Shard] = {}
        self.backups: dict[int, Backup] = {}
        self.synced: dict[int, int] = {}

    # The map.

    @property
    def _holder(self) -> str:
        """The name of this server in the map's holders, or "" while another process has the name.

        So a process holds no shards while it waits for the name of a killed process, or if it
        resumes after another process got its name.
        """
        name, process = self._role.name, self._member.incarnation
        holder = self._member.map.get("incarnations", {}).get(name, process)
        return name if holder == process else ""

    def changed(self) -> None:
        """Drop shards that the new map gives to others, and copy shards to new backups."""
        known = self._member.map
        # What a new map asks of this server, for each shard:
        #
        #     1. drop a shard that neither the map nor a copy of a later map gives to it
        #     2. a backup that the map no longer names: disconnect, and take over the actions
        #        that wait for its acknowledgement
        #     3. a new backup: connect, and send it a copy; the actions wait for that copy
        #     4. no backup, and still primary: run the actions, which nothing acknowledges
        # A copy of a later epoch belongs to a map that this server has not received.
        self.synced = {
            shard: epoch
            for shard, epoch in self.synced.items()
            if epoch > known["epoch"] or self._is_backup(shard, epoch)
        }
        for shard in list(self.shards):
            if self._holder not in known["holders"][shard] and shard not in self.synced:
                self.shards.pop(shard).close()
        for shard, names in enumerate(known["holders"]):
            name = names[1] if names[1:] and self.is_primary(shard) else None
            since, waiting = known["since"][shard], deque[tuple[int, Callable[[], None]]]()
            backup = self.backups.get(shard)
            if backup is not None:
                if (name, since) == (backup.name, backup.since):
                    continue
                waiting = self.backups.pop(shard).waiting
                self._role.unlink(backup.link)
            address = None if name is None else known["addresses"].get(name)
            if name is not None and address is not None:
                link = self._role.link(address, functools.partial(self.hear_backup, shard))
                self.backups[shard] = Backup(name, since, link, waiting)
                self.copy(shard)
            elif self.is_primary(shard):  # else drop the actions: workers retry at the new primary
                for _, act in waiting:
                    act()

    def is_primary(self, number: int) -> bool:
        """Return whether this server is the primary of a shard.

        A server with a current copy is a backup, even if its own map, of an epoch before the copy,
        has it as primary: an operation of its own would give the copy an index of the primary's.
        """
        holders = self._member.map.get("holders", [])
        is_first = 0 <= number < len(holders) and holders[number][0] == self._holder
        return is_first and number not in self.synced

    def _is_backup(self, number: int, epoch: int) -> bool:
        """Return whether a copy sent in `epoch` belongs to this server's current role as backup."""
        known = self._member.map
        return self._holder in known["holders"][number][1:] and epoch >= known["since"][number]

    # The primary.

    def copy(self, number: int) -> None:
        """Send a copy of a shard to its backup, if there is one."""
        backup, shard = self.backups.get(number), self.shards.get(number)
        if backup is not None:
            backup.sent_s = time.monotonic()
            if shard is not None:
                state, tensors = shard.state()
                backup.sent.clear()
                epoch = self._member.map["epoch"]
                fields = {"shard": number, "epoch": epoch, "state": state}
                backup.link.send(WireMessage("copy", fields, tensors))

    def change(self, number: int, op: str, fields: Settings, tensors: Any = ()) -> None:
        """Perform an operation on a shard, and send it to the backup.

        A new version is published once the backup has the operation.
        """
        shard, backup = self.shards[number], self.backups.get(number)
        before = shard.version
        shard.perform(op, fields, tensors)
        if backup is not None:
            more = {"shard": number, "epoch": self._member.map["epoch"], "index": shard.index}
            message = WireMessage("op", {**more, "op": op, "fields": fields}, tensors)
            backup.sent[shard.index] = message
            backup.sent_s = time.monotonic()
            backup.link.send(message)
        if shard.version > before and shard.memory is not None:
            self.after(number, functools.partial(shard.memory.publish, shard.version))

    def after(self, number: int, act: Callable[[], None]) -> None:
        """Call `act` once the backup has acknowledged all operations so far."""
        backup, index = self.backups.get(number), self.shards[number].index
        if backup is None or backup.index >= index:
            act()
        else:
            backup.waiting.append((index, act))

    def tick(self) -> None:
        """Touch shared memory, and query backups that have not acknowledged for `RESEND_S`."""
        for shard in self.shards.values():
            if shard.memory is not None:
                shard.memory.touch()
        for number, backup in self.backups.items():
            if time.monotonic() - backup.sent_s > RESEND_S:
                self.query_backup(number)

    def query_backup(self, number: int) -> None:
        """Ask a backup which operation it had last, if it lacks one, see [Note: Sent again]."""
        backup, epoch = self.backups[number], self._member.map["epoch"]
        backup.sent_s = time.monotonic()
        if number in self.shards and backup.index < (sent := self.shards[number].index):
            fields = {"shard": number, "epoch": epoch, "sent": sent}
            backup.link.send(WireMessage("where", fields))

    def hear_backup(self, number: int, message: WireMessage) -> None:
        """Handle a backup's report on its copy: drop acknowledged operations, resend lost ones."""
        backup, index = self.backups[number], int(message.fields.get("index", -1))
        # A report and what the primary does:
        #
        #     ack i    operation or copy i is there     drop operations up to i, run their actions
        #     at i     to a query up to `sent`          as ack; i + 1 .. sent are lost: send them
        #     gap      no copy, or operations lack      send a copy, since they may be dropped here
        is_behind = message.kind == "at" and index < message["sent"]
        if message.kind == "gap" or (is_behind and index + 1 not in backup.sent):
            backup.index = -1  # operations were lost, or a new process has the name
            self.copy(number)
        elif message.kind in ("ack", "at"):
            backup.index = max(index, backup.index)  # reports may arrive out of order
            for each in [each for each in backup.sent if each <= index]:
                del backup.sent[each]
            while backup.waiting and backup.waiting[0][0] <= index:
                backup.waiting.popleft()[1]()
            if is_behind:  # operations sent before the query and not received are lost
                for each in [each for each in backup.sent if each <= message["sent"]]:
                    backup.link.send(backup.sent[each])

    # The backup: what it answers to a primary that it has not fenced.

    def is_fenced(self, number: int, epoch: int) -> bool:
        """Return whether a primary that sends in `epoch` has been replaced."""
        is_old = epoch < self.synced.get(number, 0)
        return is_old or (epoch <= self._member.map["epoch"] and not self._is_backup(number, epoch))

    def on_copy(self, message: WireMessage) -> WireMessage:
        """Store a copy of a shard, unless this server has later operations of its primary."""
        number, state = int(message["shard"]), message["state"]
        shard = self.shards.get(number)
        if shard is None or shard.index <= state["index"] or number not in self.synced:
            if shard is not None:
                shard.close()
            shard = self.shards[number] = Shard.of_state(state, message.tensors)
        self.synced[number] = int(message["epoch"])
        return answer("ack", shard=number, index=shard.index)

    def on_op(self, message: WireMessage) -> WireMessage:
        """Perform an operation if it is the next; report a gap before it."""
        number, index = int(message["shard"]), int(message["index"])
        shard = self.shards.get(number)
        if shard is None or number not in self.synced or index > shard.index + 1:
            return answer("gap", shard=number)
        if index == shard.index + 1:
            shard.perform(str(message["op"]), message["fields"], list(message.tensors))
        return answer("ack", shard=number, index=shard.index)

    def on_where(self, message: WireMessage) -> WireMessage:
        """Report the last operation of a shard's copy."""
        number = int(message["shard"])
        if number not in self.shards or number not in self.synced:
            return answer("gap", shard=number)
        return answer("at", shard=number, index=self.shards[number].index, sent=message["sent"])

    def close(self) -> None:
        """Close the connections to backups, and shared memory."""
        for number in list(self.backups):
            self._role.unlink(self.backups.pop(number).link)
        for shard in self.shards.values():
            shard.close()
