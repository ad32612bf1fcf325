"""The coordinator, which maintains the map of a job: its members and the holders of its shards.

It writes the map to a journal on disk (SQLite, write-ahead log) before it sends the map to anyone.
Every change starts a new epoch. A starting coordinator starts a new term of the journal: an older
coordinator detects this at its next change, and exits, and members ignore maps of older terms. A
server whose lease is over (liveness.py) is lost, and is evicted from the map: the backup of each
shard becomes its primary, and another server becomes the backup. A server's heartbeat thread
reports that it is alive, its loop which shards it has copied. A worker group whose scheduler is
lost has no live worker in the map, so that the schedulers of the other groups assign its tasks.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.lease import Leases
from phalanx.server.liveness import BEAT_S, LEASE_S
from phalanx.server.message import WireMessage, answer
from phalanx.server.message_table import PROTOCOL
from phalanx.server.placement import ranked
from phalanx.server.role import Role, Settings
from phalanx.server.secret import Secret
from phalanx.server.wire import Log


class Fenced(Exception):
    """A later coordinator owns the journal."""


class JournalError(PhalanxError):
    """The journal cannot be read or written."""


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Convert SQLite errors inside the block to a JournalError with the journal's path."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalError(
            f"journal is {path}, which cannot be read or written: {error}; repair that file, "
            "or choose another for a new job"
        ) from error


class JobJournal:
    """The state of a coordinator on disk.

    Attributes:
        term: term of this coordinator, the previous term plus 1.
    """

    def __init__(self, path: Path, job: str) -> None:
        """Open or create the journal of a job, and start a new term.

        Raises:
            ConfigError: the journal belongs to another job, or its job has ended; it is unchanged.
            JournalError: the file cannot be read or written.
        """
        self._path = path
        with _naming(path):
            self._open()
            self._file.execute("BEGIN IMMEDIATE")
            saved = self.load()
            if saved is not None and (saved["job"] != job or saved.get("closed")):
                self.close()
                why = "has ended" if saved["job"] == job else f"is {saved['job']}, not {job}"
                raise ConfigError(
                    f"journal is {path}, whose job {why}; give another --journal, or remove it"
                )
            self.term = int(self._read("term") or 0) + 1
            self._write("term", self.term)
            self._file.execute("COMMIT")

    def _open(self) -> None:
        self._file = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=FULL")
        self._file.execute("CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT)")
        self._inode = self._path.stat().st_ino

    @property
    def is_deleted(self) -> bool:
        """Whether the journal's file no longer exists."""
        return not self._path.exists()

    def load(self) -> Settings | None:
        """Return the map that was saved last; None if there is none."""
        return self._read("job")

    def save(self, job: Settings) -> None:
        """Save a map; in a new file if the old one was deleted.

        Raises:
            Fenced: a later coordinator has started, or the file was replaced.
            JournalError: the file cannot be written.
        """
        # A journal that was deleted is written anew, since the map is in memory; one that was
        # replaced belongs to somebody else. The term is read in the transaction that writes:
        #
        #     coordinator 1   term 3, epoch 7 ........ stopped ........ save: term is 4 -> fenced
        #     coordinator 2                  starts: term 4, epoch 8
        with _naming(self._path):
            if is_new := self.is_deleted:
                self._file.close()
                self._open()
            elif self._path.stat().st_ino != self._inode:
                raise Fenced("another file has replaced the journal")
            self._file.execute("BEGIN IMMEDIATE")
            if self._read("term") != (None if is_new else self.term):
                self._file.execute("ROLLBACK")
                raise Fenced(f"another coordinator has started a term, which ends term {self.term}")
            self._write("term", self.term)
            self._write("job", job)
            self._file.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, name: str) -> Any:
        row = self._file.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _write(self, name: str, value: Any) -> None:
        text = json.dumps(value)
        self._file.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, text))


class Coordinator(Role):
    """The role that maintains the map of a job.

    The map has `term`, `epoch`, `homes` (name -> weight of the first servers, on which chunks are
    placed), `addresses` by name, `incarnations` (name -> id of its process), `holders` (for each
    shard its primary, then its backup), `since` (for each shard the epoch in which its backup was
    assigned), `groups` (for each worker group the address of its `scheduler`, its `workers` and how
    many of them are live), `stop_signal`, `protocol`, `job`, `ended` and `closed` (all members know
    of the end).

    Attributes:
        map: the map.
        leases: leases of the servers in the map.
        synced: (shard, server) of the backups that have a full copy.
    """

    kind = "coordinator"

    def __init__(
        self, num_servers: int, job: str, journal: Path, secret: Secret, address: str, log: Log,
        num_groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__("coordinator", secret, address, log)
        try:
            self._journal = JobJournal(journal, job)
        except PhalanxError:
            super().close()
            raise
        self._num_servers = num_servers
        self.map: Settings = self._journal.load() or {
            "job": job, "epoch": 0, "homes": {}, "addresses": {}, "incarnations": {},
            "holders": [], "since": [], "stop_signal": 0, "ended": False,
            "groups": [{"scheduler": "", "workers": [], "num_live": 0} for _ in range(num_groups)],
        }  # fmt: skip
        self.map |= {"term": self._journal.term, "protocol": PROTOCOL}
        self.leases = Leases(lambda: self.clock.now_s, self.map["addresses"])
        self._schedulers = Leases(lambda: self.clock.now_s, range(len(self.map["groups"])))
        self._facts: Settings | None = None
        self.synced = set[tuple[int, str]]()
        self._asked_s: dict[tuple[str, str], float] = {}  # first request for a name in use
        self._ended_s = 0.0
        self._told = set[str]()  # servers, and addresses of schedulers, notified of the end
        self.change(f"term {self._journal.term} begins")

    @override
    def reply(self, peer: bytes, request: WireMessage, reply: WireMessage) -> None:
        """Answer a request, unless another coordinator or journal is newer.

        This coordinator's map may then have a change that is not in the journal.
        """
        if not self.refusal:
            super().reply(peer, request, reply)

    def on_map(self, _: WireMessage) -> WireMessage:
        """Return the map."""
        return WireMessage("map", self.map)

    def on_end(self, message: WireMessage) -> WireMessage:
        """End the job; its members are notified at their next heartbeat."""
        if not self.map["ended"]:
            self.map["ended"] = True
            self.change("the job has ended")
        return self.on_map(message)

    def on_agree(self, message: WireMessage) -> WireMessage:
        """Return the facts of the job that the first worker has sent."""
        self._facts = self._facts or message["facts"]
        return answer("ok", facts=self._facts)

    def on_alive(self, message: WireMessage) -> None:
        """Renew the lease of a server, unless it is lost or replaced."""
        if self.map["incarnations"].get(message["name"]) == message["incarnation"]:
            self.leases.renew(message["name"])

    def on_beat(self, beat: WireMessage) -> WireMessage | None:
        """Admit or refuse a member, note what it reports, and return the map."""
        protocol, job = beat.fields.get("protocol", PROTOCOL), beat.fields.get("job")
        why = ""
        if protocol != PROTOCOL:
            why = (
                f"has version {protocol} of the message protocol, but the coordinator has version "
                f"{PROTOCOL}; install the same version of phalanx on all hosts"
            )
        elif job != self.map["job"]:
            why = f"is of job {job}, but this is job {self.map['job']}"
        if why:
            self.log(f"refused: {beat['name']} {why}")
            return answer("refused", why=f"it {why}")
        known = [beat.fields.get("term", 0), beat.fields.get("epoch", 0)]
        if known > [self.map["term"], self.map["epoch"]]:
            self._leave(
                f"{beat['name']} has a map of term {known[0]}, epoch {known[1]}, later than "
                "the journal: it is a different journal, or was deleted"
            )
            return None
        hear = self._hear_scheduler if beat["role"] == "scheduler" else self._hear_server
        hear(beat)
        return self.on_map(beat)

    def _hear_scheduler(self, beat: WireMessage) -> None:
        """Note the address and the workers of a group's scheduler.

        Raises:
            ValueError: the job has no such group, or another process is its scheduler.
        """
        address, said, groups = str(beat["address"]), beat["group"], self.map["groups"]
        if (number := int(said["number"])) >= len(groups):
            raise ValueError(
                f"it is the scheduler of group {number}, but the job has groups 0 to "
                f"{len(groups) - 1}; give the coordinator --num-groups {number + 1}"
            )
        group, is_silent = groups[number], number in self._schedulers.older(LEASE_S)
        if group["scheduler"] not in ("", address) and not is_silent:
            name = f"scheduler{number}"
            self._refuse_later(name, str(beat["incarnation"]), "each scheduler its own --group")
            return
        self._schedulers.renew(number)
        self.map["stop_signal"] = self.map["stop_signal"] or int(said["stop_signal"])
        if said["live"] is not None:  # else it has just started, and workers are yet to ask
            for each in groups:  # a worker that was restarted may have changed its group
                each["workers"] = sorted({*each["workers"]} - {*said["live"]})
            group["workers"] = sorted({*group["workers"], *said["live"]})
            self._set_live(number, len(said["live"]))
        if self.map["ended"]:
            self._told.add(address)
        if group["scheduler"] != address:
            group["scheduler"] = address
            self.change(f"the scheduler of group {number} is at {address}")

    def _set_live(self, number: int, num_live: int) -> None:
        """Note how many workers of a group are live; its scheduler may be lost."""
        group = self.map["groups"][number]
        if group["num_live"] and not num_live and not self.map["ended"]:
            self.log(f"group {number} has no live worker; others get the tasks that it has left")
        group["num_live"] = num_live

    def _hear_server(self, beat: WireMessage) -> None:
        """Admit a server to the map, and note of which shards it has copies.

        Raises:
            ValueError: another process has the name, is not lost, and this one has waited for the
                name for 2 leases.
        """
        name, incarnation = str(beat["name"]), str(beat["incarnation"])
        if self.map["incarnations"].get(name) != incarnation:
            if name in self.leases.renewed_s:
                self._refuse_later(name, incarnation, "each server its own --name")
                return
            self.map["incarnations"][name] = incarnation
            self.map["addresses"][name] = str(beat["address"])
            if len(self.map["homes"]) < self._num_servers:
                self.map["homes"][name] = float(beat.fields.get("weight", 1.0))
            self._place()
            self.change(f"{name} has joined at {beat['address']}")
        self.leases.renew(name)
        holders = self.map["holders"]
        for shard, epoch in beat["synced"]:
            if holders[shard][1:] == [name] and epoch >= self.map["since"][shard]:
                self.synced.add((int(shard), name))  # an older copy lacks later operations
        # Promote a synced backup that is no primary, if the shard's primary has several shards.
        for shard, names in enumerate(holders):
            if len(names) == 2 and (shard, names[1]) in self.synced:
                primaries = [each[0] for each in holders]
                if primaries.count(names[0]) > 1 and names[1] not in primaries:
                    holders[shard] = names[1:]
                    self._add_backup(shard, names[0])
                    self.change(f"shard {shard} moves to {names[1]}")
        if self.map["ended"]:
            self._told.add(name)

    def _refuse_later(self, name: str, incarnation: str, advice: str) -> None:
        """Note that a process asks for a name, which belongs to another until that one is lost.

        Raises:
            ValueError: it has waited for 2 leases.
        """
        now_s, key = self.clock.now_s, (name, incarnation)
        if key not in self._asked_s:
            self.log(f"another process also has the name {name}; it waits until the first is lost")
        if now_s - self._asked_s.setdefault(key, now_s) > 2 * LEASE_S:
            raise ValueError(f"another process already has the name {name}; give {advice}")

    def _place(self) -> None:
        """Assign each shard a primary, and a backup if there is another server for it."""
        homes, live = self.map["homes"], dict.fromkeys(self.map["addresses"], 1.0)
        if len(homes) < self._num_servers:
            return
        if not self.map["holders"]:
            self.map["holders"] = [[name] for name in sorted(homes)]
            self.map["since"] = [0] * len(homes)
        for shard, names in enumerate(self.map["holders"]):
            for name in ranked(f"backup of {shard}", live):
                if names and len(names) < 2 and name not in names:
                    self._add_backup(shard, name)

    def _add_backup(self, shard: int, name: str) -> None:
        self.map["holders"][shard].append(name)
        self.map["since"][shard] = self.map["epoch"] + 1
        self.synced.discard((shard, name))

    def evict(self, lost: list[str]) -> None:
        """Remove lost servers from the map; synced backups become primaries of their shards."""
        # Server a is lost. Each shard keeps its first holder that has a full copy:
        #
        #     holders    synced    becomes                      why
        #     [a]        -         [a], lost with a             a may come back under its name
        #     [a, b]     b         [b], then a new backup       b has all that a has acknowledged
        #     [a, b]     no        [a], lost with a             b lacks operations: never promoted
        #     [b, a]     -         [b], then a new backup
        for name in lost:
            self.map["addresses"].pop(name, None)
            self.map["incarnations"].pop(name, None)
            self.leases.forget(name)
            self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if key[0] != name}
            for shard, names in enumerate(self.map["holders"]):
                if names == [name]:
                    self.log(f"shard {shard} is lost with {name}: no other server has a copy")
                if names[:1] == [name] and names[1:] and (shard, names[1]) not in self.synced:
                    self.log(f"shard {shard} is lost with {name}: {names[1]} has no full copy yet")
                    names[:] = [name]
                if name in names and names != [name]:
                    names.remove(name)
        self._place()

    @override
    def tick(self) -> None:
        super().tick()
        lost, silent = self.leases.older(LEASE_S), self._schedulers.older(LEASE_S)
        for number in silent:
            self._set_live(number, 0)
        # After the end the coordinator stays until every member that still lives has heard of it,
        # and two beats longer, for workers that ask for the map; a journal that is `closed` starts
        # no more.
        if self.map["ended"]:  # members are notified at their next heartbeat
            self._ended_s = self._ended_s or self.clock.now_s
            is_told = self.leases.renewed_s.keys() <= self._told.union(lost)
            schedulers = {group["scheduler"] for group in self.map["groups"]}
            schedulers -= {self.map["groups"][each]["scheduler"] for each in silent}
            is_told &= schedulers <= self._told.union([""])
            if is_told and self.clock.now_s - self._ended_s > 2 * BEAT_S:
                self.map["closed"] = self.is_over = True
                self.change("all members know of the end")
        elif lost:
            self.evict(lost)
            self.change(f"{', '.join(lost)} lost")
        elif self._journal.is_deleted:
            self.change("the journal was deleted, and is written again")

    def change(self, why: str) -> None:
        """Start a new epoch: save the map, or exit if a later coordinator owns the journal."""
        self.map["epoch"] += 1
        try:
            self._journal.save(self.map)
        except Fenced as error:
            self._leave(f"this coordinator no longer writes the journal: {error}")
            return
        self.log(f"epoch {self.map['epoch']}: {why}; holders {self.map['holders']}")

    def _leave(self, why: str) -> None:
        """Exit before the job ends, because another coordinator or journal is newer."""
        self.log(why)
        self.refusal, self.is_over = why, True

    @override
    def close(self) -> None:
        super().close()
        self._journal.close()
