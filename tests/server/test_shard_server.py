"""Servers that answer workers, while a test decides which messages between the servers arrive."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from phalanx.server.consistency import Consistency
from phalanx.server.message import WireMessage
from phalanx.server.secret import Secret
from phalanx.server.shard_server import Server
from phalanx.server.wire import Connection


class Link:
    """A connection between the servers; its messages stay in `queue` until a test delivers them."""

    def __init__(self, hear: Callable[[WireMessage], None]) -> None:
        self.hear = hear
        self.queue: list[WireMessage] = []

    def send(self, message: WireMessage) -> None:
        self.queue.append(message)


class Pair:
    """Servers a and b, which store one shard."""

    def __init__(self, folder: Path, consistency: Consistency) -> None:
        self._links: dict[str, list[Link]] = {"a": [], "b": []}
        self._answers: list[tuple[bytes, WireMessage]] = []
        self._num_asked = 0
        self.a, self.b = self._server(folder, "a"), self._server(folder, "b")
        for server in (self.a, self.b):
            self.take(server, 1, ["a", "b"], 1)
        spec = {"sizes": [2], "dtype": "float64", "rule": {"name": "sgd"}, "p": 2.0}
        spec["consistency"] = vars(consistency)
        fields = {"spec": spec, "version": 0, "steps": 0.0, "num_kept": []}
        self.ask(self.a, "init", [torch.zeros(2, dtype=torch.float64)], **fields)
        self.deliver(self.a, self.b)

    def _server(self, folder: Path, name: str) -> Server:
        own = (name, Secret(bytes(32)), f"ipc://{folder}/{name}", print)
        server = Server("job", f"ipc://{folder}/coordinator", name, *own)

        def link(_: str, hear: Callable[[WireMessage], None]) -> Connection:
            self._links[name].append(made := Link(hear))
            return cast("Connection", made)

        server.link, server.unlink = link, lambda _: None
        server.listener.send = lambda peer, message: self._answers.append((peer, message))
        return server

    def take(self, server: Server, epoch: int, holders: list[str], since: int) -> None:
        """Give a server the map of an epoch."""
        rest = {"term": 1, "incarnations": {}, "addresses": {"a": "a", "b": "b"}}
        server.member.take({**rest, "epoch": epoch, "holders": [holders], "since": [since]})

    def ask(
        self, server: Server, kind: str, tensors: Any = (), **fields: Any
    ) -> Callable[[], WireMessage | None]:
        """Send a worker's request; return a function that returns its answer, None without one."""
        self._num_asked += 1
        number = self._num_asked
        more = {"q": number, "shard": 0, "is_known": True}
        server.handle_or_refuse(b"worker", WireMessage(kind, {**more, **fields}, tensors))

        def answer() -> WireMessage | None:
            of_worker = [message for peer, message in self._answers if peer == b"worker"]
            return next((each for each in of_worker if each["q"] == number), None)

        return answer

    def push(
        self, server: Server, clock: int, slot: int, **fields: Any
    ) -> Callable[[], WireMessage | None]:
        numbers = {"base": 0, "tokens": 1.0, "loss": 0.0, "rate": 1.0}
        grads = [torch.full((2,), 1.0 + slot, dtype=torch.float64)]
        return self.ask(server, "push", grads, clock=clock, slot=slot, **numbers, **fields)

    def deliver(self, source: Server, target: Server, most: int = 1000) -> None:
        """Deliver up to `most` messages of each connection of a server, and the answers."""
        for link in self._links[source.name]:
            queue, link.queue = link.queue, []
            for message in queue[:most]:
                begin = len(self._answers)
                target.handle(b"server", message)
                for peer, answer in self._answers[begin:]:
                    if peer == b"server":
                        link.hear(answer)


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[Pair]:
    made = Pair(tmp_path, request.param)
    yield made
    for server in (made.a, made.b):
        server.close()


def is_done(server: Server, clock: int, slot: int) -> bool:
    return server.replicas.shards[0].done.has(clock, slot)


@pytest.mark.parametrize("pair", [Consistency("ps", 2)], indirect=True)
def test_a_former_primary_with_a_copy_of_a_later_epoch_answers_no_worker(pair: Pair) -> None:
    """It was suspended; b became the primary, and the map by which b copies has not come yet."""
    pair.take(pair.b, 2, ["b"], 1)
    pair.take(pair.b, 3, ["b", "a"], 3)
    pair.deliver(pair.b, pair.a)
    refused = pair.push(pair.a, 0, 1)()
    assert refused is not None and refused.kind == "moved"
    pushed = pair.push(pair.b, 0, 0)
    assert pushed() is None
    pair.deliver(pair.b, pair.a)
    assert pushed() is not None
    pair.take(pair.a, 2, ["b"], 1)  # of before the copy
    pair.take(pair.a, 3, ["b", "a"], 3)
    assert pair.a.facts()["synced"] == [(0, 3)]
    pair.take(pair.a, 4, ["a"], 3)
    pushed = pair.push(pair.a, 0, 1)()
    assert pushed is not None and pushed.kind == "ok"
    assert is_done(pair.a, 0, 0) and pair.a.facts()["synced"] == []


@pytest.mark.parametrize("pair", [Consistency("quorum", 3, 2, grace_s=1e6)], indirect=True)
def test_a_former_primary_with_a_copy_of_a_later_epoch_closes_no_update(pair: Pair) -> None:
    for slot in range(2):
        pair.push(pair.a, 0, slot)
    pair.deliver(pair.a, pair.b)
    pair.take(pair.b, 2, ["b"], 1)
    pair.take(pair.b, 3, ["b", "a"], 3)
    pair.deliver(pair.b, pair.a)
    copy = pair.a.replicas.shards[0]
    index = copy.index
    copy.consistency = Consistency("quorum", 3, 2)  # the grace time ends
    pair.a.tick()
    assert (copy.version, copy.index) == (0, index)


REPORTS: dict[str, Consistency] = {
    "totals": Consistency("ps", 2),
    "gradient": Consistency("ps", 2),
    "stats": Consistency("async", 2),
    "read": Consistency("async", 2),
}


@pytest.mark.parametrize(("kind", "pair"), REPORTS.items(), indirect=["pair"])
def test_a_report_waits_until_the_backup_has_what_it_reports(kind: str, pair: Pair) -> None:
    """Else a worker that starts again passes by a task that only the lost primary had."""
    pair.push(pair.a, 0, 1)
    asked = pair.ask(pair.a, kind, needed=0)
    assert asked() is None
    pair.deliver(pair.a, pair.b)
    assert asked() is not None and is_done(pair.b, 0, 1)


@pytest.mark.parametrize("pair", [Consistency("local", 2, 2)], indirect=True)
def test_the_states_for_a_checkpoint_wait_until_the_backup_has_them(pair: Pair) -> None:
    for slot in range(2):
        pair.ask(pair.a, "upload", [torch.ones(2)], clock=0, slot=slot)
    asked = pair.ask(pair.a, "download", clock=0)
    assert asked() is None
    pair.deliver(pair.a, pair.b)
    assert asked() is not None and len(pair.b.replicas.shards[0].uploads) == 2


@pytest.mark.parametrize("pair", [Consistency("quorum", 3, 3)], indirect=True)
def test_a_backup_that_becomes_the_primary_knows_how_many_workers_are_left(pair: Pair) -> None:
    """Else it waits for the push of a worker that has left, as nobody reports that again."""
    for slot in range(2):
        pair.push(pair.a, 0, slot, num_live=3)
    pair.deliver(pair.a, pair.b)
    reported = pair.ask(pair.a, "live", num_live=2)
    assert pair.a.replicas.shards[0].version == 1 and reported() is None
    pair.deliver(pair.a, pair.b, most=1)  # not the operation that closes the update
    assert reported() is None and pair.b.replicas.shards[0].version == 0
    pair.take(pair.b, 2, ["b"], 1)
    pulled = pair.ask(pair.b, "pull", needed=1, recipes=[])
    assert pulled() is None
    pair.b.tick()
    assert pulled() is not None


@pytest.mark.parametrize("pair", [Consistency("quorum", 3, 3)], indirect=True)
def test_a_copy_has_the_number_of_workers(pair: Pair) -> None:
    pair.ask(pair.a, "live", num_live=2)
    pair.deliver(pair.a, pair.b, most=0)
    pair.take(pair.a, 2, ["a", "b"], 2)
    pair.take(pair.b, 2, ["a", "b"], 2)
    pair.deliver(pair.a, pair.b)
    assert pair.b.replicas.shards[0].num_workers == 2


@pytest.mark.parametrize("pair", [Consistency("ps", 2)], indirect=True)
def test_requests_before_the_weights_are_answered_once_these_come(pair: Pair) -> None:
    """A malformed one is refused, and does not end the server."""
    shard = pair.a.replicas.shards.pop(0)
    pushed = [pair.push(pair.a, 0, slot, is_known=False) for slot in range(2)]
    malformed = pair.ask(pair.a, "totals", is_known=False, needed="x")
    pair.a.tick()
    assert not any(answer() for answer in (*pushed, malformed))
    pair.a.replicas.shards[0] = shard
    pair.a.tick()
    pair.deliver(pair.a, pair.b)
    answers = [answer() for answer in (*pushed, malformed)]
    assert [each and each.kind for each in answers] == ["ok", "ok", "refused"]
    assert all(is_done(server, 0, slot) for server in (pair.a, pair.b) for slot in range(2))


@pytest.mark.parametrize("pair", [Consistency("async", 2)], indirect=True)
def test_a_pull_of_rows_that_do_not_exist_is_refused_before_it_waits_for_the_backup(
    pair: Pair,
) -> None:
    """Else the backup's report would raise the error, and later answers would wait for another."""
    pair.push(pair.a, 0, 0)
    refused = pair.ask(pair.a, "pull", [torch.tensor([7])], needed=0, recipes=[], table=0)
    pulled = pair.ask(pair.a, "pull", needed=1, recipes=[])
    pair.deliver(pair.a, pair.b)
    answers = [answer() for answer in (refused, pulled)]
    assert [each and each.kind for each in answers] == ["refused", "ok"]
