"""Replication: an operation is acknowledged once the backup has it, however messages are lost."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.server.consistency import Consistency
from phalanx.server.message import WireMessage
from phalanx.server.secret import Secret
from phalanx.server.shard import Shard
from phalanx.server.shard_server import Server
from phalanx.server.wire import Connection

NAMES = "primary", "backup"
MAP = {
    "epoch": 1, "term": 1, "holders": [list(NAMES)], "since": [1],
    "addresses": dict.fromkeys(NAMES, "nowhere"), "incarnations": {},
}  # fmt: skip


class _Pair:
    """A primary and a backup; a test decides which of their messages arrive, and in what order."""

    def __init__(self, primary: Server, backup: Server) -> None:
        self.primary, self.backup = primary, backup
        self.to_backup: list[WireMessage] = []
        self.to_primary: list[WireMessage] = []
        self.num_pushed = self.num_acknowledged = 0

    def send(self, message: WireMessage) -> None:
        """Send to the backup: this is the primary's connection."""
        self.to_backup.append(message)

    def reply(self, _: bytes, __: WireMessage, reply: WireMessage) -> None:
        self.to_primary.append(reply)

    def check_backup(self, due: int) -> None:
        has = self.backup.replicas.shards[0].index
        assert has >= due, "acknowledged, but the backup lacks it"

    def push(self) -> None:
        fields = {"clock": self.num_pushed, "slot": 0, "base": 0, "tokens": 1.0, "loss": 0.0}
        grads = [torch.full((3,), float(self.num_pushed), dtype=torch.float64)]
        self.primary.replicas.change(0, "push", fields, grads)
        self.num_pushed += 1
        due = self.num_pushed

        def acknowledge() -> None:
            assert self.num_acknowledged == due - 1, "in order"
            self.check_backup(due)
            self.num_acknowledged = due

        self.primary.replicas.after(0, acknowledge)

    def push_again(self) -> None:
        """Repeat the last push, as a worker does whose answer was lost."""
        due = self.num_pushed

        def acknowledge() -> None:
            self.check_backup(due)

        self.primary.replicas.after(0, acknowledge)

    def deliver_to_backup(self, message: WireMessage) -> None:
        self.backup.handle(b"primary", message)

    def deliver_to_primary(self, message: WireMessage) -> None:
        self.primary.replicas.hear_backup(0, message)

    def ask_again(self) -> None:
        self.primary.replicas.query_backup(0)


@contextmanager
def _pair() -> Generator[_Pair]:
    with tempfile.TemporaryDirectory() as folder:
        made: list[Server] = []
        for name in NAMES:
            where = f"ipc://{folder}/coordinator", name, name, Secret(bytes(32))
            made.append(Server("job", *where, f"ipc://{folder}/{name}", print))
        pair = _Pair(*made)
        pair.primary.link = lambda *_: cast("Connection", pair)
        pair.primary.unlink = lambda _: None
        pair.backup.reply = pair.reply
        for role in made:
            role.member.take(dict(MAP))
        spec = {"sizes": [3], "dtype": "float64", "rule": {"name": "sgd"}, "p": 2.0}
        spec["consistency"] = vars(Consistency("ps", 1))
        pair.primary.replicas.shards[0] = Shard(spec, [torch.zeros(3, dtype=torch.float64)])
        pair.primary.replicas.copy(0)
        try:
            yield pair
        finally:
            for role in made:
                role.close()


FATES = st.sampled_from([
    "push", "push again", "arrives", "is doubled", "is lost", "arrives last", "ask again",
])  # fmt: skip


OLD_REPORT_AFTER_A_LOST_COPY = [
    ("arrives", True), ("is doubled", False),  # the first copy, and its report twice
    ("push", True), ("is lost", True), ("push", True), ("arrives", True),  # so the backup has a gap
    ("arrives last", False), ("arrives", False),  # the primary sends another copy,
    ("is lost", True), ("arrives", False),  # which is lost; the report of the first copy
]  # fmt: skip


@example(OLD_REPORT_AFTER_A_LOST_COPY)
@example([*OLD_REPORT_AFTER_A_LOST_COPY, ("push again", True)])
@given(st.lists(st.tuples(FATES, st.booleans()), max_size=40))
def test_backup_has_each_operation_before_it_is_acknowledged(
    fates: list[tuple[str, bool]],
) -> None:
    with _pair() as pair:
        for fate, is_to_backup in fates:
            queue = pair.to_backup if is_to_backup else pair.to_primary
            deliver = pair.deliver_to_backup if is_to_backup else pair.deliver_to_primary
            if fate == "push":
                pair.push()
            elif fate == "push again":
                pair.push_again()
            elif fate == "ask again":
                pair.ask_again()
            elif queue:
                message = queue.pop(0)
                if fate == "arrives last":
                    queue.append(message)
                if fate in ("arrives", "is doubled"):
                    deliver(message)
                if fate == "is doubled":
                    queue.append(message)
        for _ in range(4):  # now all messages arrive, and the primary asks again
            while pair.to_backup or pair.to_primary:
                if pair.to_backup:
                    pair.deliver_to_backup(pair.to_backup.pop(0))
                if pair.to_primary:
                    pair.deliver_to_primary(pair.to_primary.pop(0))
            pair.ask_again()
        assert pair.num_acknowledged == pair.num_pushed
        assert not pair.to_backup, "the primary still asks"
        states = [role.replicas.shards[0].state() for role in (pair.primary, pair.backup)]
        assert states[0][0] == states[1][0]
        assert all(torch.equal(*each) for each in zip(states[0][1], states[1][1], strict=True))
