"""The journal, the fence against an older coordinator, and who holds what."""

from pathlib import Path

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.server.coordinator import Coordinator, Fenced, JobJournal, JournalError
from phalanx.server.liveness import LEASE_S
from phalanx.server.message import WireMessage
from phalanx.server.secret import Secret
from phalanx.server.shard import Shard
from phalanx.server.shard_server import Server


def listen(coordinator: Coordinator, now_s: list[float], for_s: float) -> None:
    """Have time pass in which a coordinator listens."""
    for _ in range(round(for_s / 0.125)):
        now_s[0] += 0.125
        coordinator.tick()


def test_a_later_coordinator_ends_an_older_one(tmp_path: Path) -> None:
    first = JobJournal(tmp_path / "journal", "job")
    first.save({"job": "job", "epoch": 1})
    second = JobJournal(tmp_path / "journal", "job")
    assert second.term == first.term + 1 and second.load() == {"job": "job", "epoch": 1}
    with pytest.raises(Fenced):
        first.save({"epoch": 2})
    second.save({"job": "job", "epoch": 3})
    second.close()
    first.close()
    third = JobJournal(tmp_path / "journal", "job")
    assert third.load() == {"job": "job", "epoch": 3}
    third.close()


def test_a_coordinator_that_is_fenced_answers_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its map has a change that is not in the journal, under an epoch that the later one saves."""
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    first = Coordinator(1, "job", tmp_path / "journal", *own)
    said = list[WireMessage]()
    monkeypatch.setattr(first.listener, "send", lambda _, message: said.append(message))

    def beat(name: str) -> WireMessage:
        fields = {"name": name, "role": "server", "address": name, "incarnation": name}
        return WireMessage("beat", {**fields, "job": "job", "synced": []})

    second: Coordinator | None = None
    try:
        first.handle(b"a", beat("a"))
        assert [each.kind for each in said] == ["map"]
        other = (own[0], f"ipc://{tmp_path}/other", lambda _: None)
        second = Coordinator(1, "job", tmp_path / "journal", *other)
        first.handle(b"a", beat("a"))  # no change
        assert len(said) == 2 and said[1]["addresses"] == {"a": "a"}
        for message in (beat("b"), beat("a"), WireMessage("map"), WireMessage("end", {"q": 1})):
            first.handle(b"", message)
        assert first.is_over and len(said) == 2
        assert second.map["addresses"] == {"a": "a"} and not second.map["ended"]
    finally:
        first.close()
        if second is not None:
            second.close()


def test_a_journal_that_is_deleted_is_written_again(tmp_path: Path) -> None:
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(1, "job", tmp_path / "journal", *own)
    try:
        (tmp_path / "journal").unlink()
        coordinator.tick()
        assert not coordinator.is_over
        later = JobJournal(tmp_path / "journal", "job")
        assert later.term == 2 and later.load() == coordinator.map
        later.close()
        for path in tmp_path.glob("journal*"):
            path.unlink()
        JobJournal(tmp_path / "journal", "job").close()  # a coordinator of another start
        coordinator.change("something happens")
        assert coordinator.is_over and "no longer writes the journal" in coordinator.refusal
    finally:
        coordinator.close()


def test_a_journal_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no journal " * 100)
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    for name in ("text", "folder/journal", "."):
        with pytest.raises(JournalError, match="which cannot be read or written"):
            Coordinator(1, "job", tmp_path / name, *own)
    assert (tmp_path / "text").read_text() == "no journal " * 100
    journal = JobJournal(tmp_path / "journal", "job")
    journal._file.execute("PRAGMA max_page_count = 3")  # SQLite says so of a full disk too
    with pytest.raises(JournalError, match="database or disk is full"):
        journal.save({"much": "x" * 100_000})
    journal.close()


def test_a_coordinator_without_the_jobs_journal_ends(tmp_path: Path) -> None:
    """Members would not take its map, and nobody would hear of the end of the job."""
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(1, "job", tmp_path / "journal", *own)
    fields = {"name": "a", "role": "server", "address": "a", "incarnation": "a", "synced": []}
    try:
        known = {"term": 1, "epoch": coordinator.map["epoch"], "job": "job"}
        coordinator.handle(b"", WireMessage("beat", {**fields, **known}))
        assert not coordinator.is_over
        known["epoch"] = coordinator.map["epoch"] + 1
        coordinator.handle(b"", WireMessage("beat", {**fields, **known}))
        assert coordinator.is_over and "was deleted" in coordinator.refusal
    finally:
        coordinator.close()


def test_a_server_that_was_held_for_lost_has_no_copy_until_it_is_sent_one(tmp_path: Path) -> None:
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(2, "job", tmp_path / "journal", *own)

    def beat(name: str, synced: list[tuple[int, int]]) -> None:
        fields = {"name": name, "role": "server", "address": name, "incarnation": name}
        coordinator.handle(b"", WireMessage("beat", {**fields, "job": "job", "synced": synced}))

    try:
        for name in "ab":
            beat(name, [])
        before = coordinator.map["epoch"]
        beat("a", [(1, before)])
        beat("b", [(0, before)])
        coordinator.evict(["b"])
        assert coordinator.map["holders"] == [["a"], ["a"]]
        for _ in range(2):
            beat("b", [(0, before)])
            assert coordinator.map["holders"] == [["a", "b"], ["a", "b"]]
        beat("b", [(0, coordinator.map["epoch"])])
        assert coordinator.map["holders"] == [["b", "a"], ["a", "b"]]
    finally:
        coordinator.close()


def test_a_name_is_kept_for_the_server_that_has_it(tmp_path: Path, now_s: list[float]) -> None:
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(1, "job", tmp_path / "journal", *own)

    def beat(incarnation: str) -> str:
        fields = {"name": "a", "role": "server", "address": incarnation, "synced": []}
        more = {"incarnation": incarnation, "job": "job"}
        coordinator.handle(b"", WireMessage("beat", {**fields, **more}))
        return coordinator.map["addresses"]["a"]

    try:
        assert beat("first") == "first"
        epoch = coordinator.map["epoch"]
        for _ in range(4):  # two containers of one name: the first is there, and stays
            assert beat("second") == "first" and beat("first") == "first"
            listen(coordinator, now_s, 0.5 * LEASE_S)
        listen(coordinator, now_s, 0.125)
        with pytest.raises(ValueError, match="another process already has the name a; give each"):
            beat("second")
        assert coordinator.map["epoch"] == epoch
        assert beat("third") == "first"  # started again after the first has ended
        listen(coordinator, now_s, LEASE_S + 0.125)
        assert beat("third") == "third"
    finally:
        coordinator.close()


def test_silence_counts_while_the_coordinator_listens(tmp_path: Path, now_s: list[float]) -> None:
    """Not while it is stopped. A server that is lost, or replaced, is not back by being alive."""
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(2, "job", tmp_path / "journal", *own)

    def say(kind: str, name: str, incarnation: str) -> list[str]:
        fields = {"name": name, "role": "server", "address": name, "incarnation": incarnation}
        message = WireMessage(kind, {**fields, "job": "job", "synced": []})
        coordinator.handle(b"", message)
        return sorted(coordinator.map["addresses"])

    try:
        for name in "ab":
            say("beat", name, "1")
        for _ in range(10):
            now_s[0] += 100 * LEASE_S
            coordinator.tick()
            assert say("alive", "a", "1") == ["a", "b"]
        listen(coordinator, now_s, LEASE_S - 2)
        assert say("alive", "a", "1") == ["a", "b"]
        listen(coordinator, now_s, 2)
        assert say("alive", "a", "1") == say("alive", "b", "1") == ["a"]
        assert say("beat", "b", "2") == ["a", "b"]
        listen(coordinator, now_s, LEASE_S)
        assert say("alive", "a", "1") == say("alive", "b", "1") == ["a", "b"]
        listen(coordinator, now_s, 0.125)
        assert say("alive", "b", "2") == ["a"]
    finally:
        coordinator.close()


def test_a_coordinator_stays_until_servers_that_are_there_know_of_the_end(
    tmp_path: Path, now_s: list[float]
) -> None:
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(3, "job", tmp_path / "journal", *own)

    def say(kind: str, name: str) -> None:
        fields = {"name": name, "role": "server", "address": name, "incarnation": "1"}
        coordinator.handle(b"", WireMessage(kind, {**fields, "job": "job", "synced": []}))

    try:
        for name in "abc":
            say("beat", name)
        coordinator.handle(b"", WireMessage("end"))
        say("beat", "a")
        for _ in range(4):  # b computes, and c has gone
            listen(coordinator, now_s, LEASE_S)
            assert not coordinator.is_over
            say("alive", "b")
        say("beat", "b")
        listen(coordinator, now_s, 0.125)
        assert coordinator.is_over
    finally:
        coordinator.close()
    for job, why in {"job": "has ended", "second": "is job, not second"}.items():
        with pytest.raises(ConfigError, match=f"journal, whose job {why}; give another --journal"):
            Coordinator(3, job, tmp_path / "journal", *own)


def test_a_coordinator_stays_until_the_scheduler_knows_of_the_end(
    tmp_path: Path, now_s: list[float]
) -> None:
    """It may have been stopped for seconds; one that is away for a lease is not waited for."""
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)

    def beat(coordinator: Coordinator) -> None:
        fields = {"name": "scheduler", "role": "scheduler", "address": "there", "incarnation": "1"}
        group = {"number": 0, "live": None, "stop_signal": 0}
        coordinator.handle(b"", WireMessage("beat", {**fields, "job": "job", "group": group}))

    for number, comes_back in enumerate((True, False)):
        coordinator = Coordinator(1, "job", tmp_path / f"journal{number}", *own)
        try:
            beat(coordinator)
            coordinator.handle(b"", WireMessage("end"))
            listen(coordinator, now_s, LEASE_S - 0.5)
            assert not coordinator.is_over
            if comes_back:
                beat(coordinator)
            listen(coordinator, now_s, 0.125 if comes_back else 1.0)
            assert coordinator.is_over
        finally:
            coordinator.close()


def test_a_group_is_lost_with_its_scheduler_or_with_its_last_worker(
    tmp_path: Path, now_s: list[float]
) -> None:
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(1, "job", tmp_path / "journal", *own, num_groups=2)

    def beat(number: int, live: list[int] | None, address: str = "") -> list[int]:
        """Return how many workers of each group are live after a beat of a scheduler."""
        group = {"number": number, "live": live, "stop_signal": 0}
        where = address or f"at {number}"
        fields = {"name": f"scheduler{number}", "role": "scheduler", "address": where}
        more = {"incarnation": where, "job": "job", "group": group}
        coordinator.handle(b"", WireMessage("beat", {**fields, **more}))
        return [each["num_live"] for each in coordinator.map["groups"]]

    try:
        assert beat(0, [0, 1]) == [2, 0] and beat(1, [2, 3]) == [2, 2]
        assert beat(1, [2]) == [2, 1]
        assert [each["workers"] for each in coordinator.map["groups"]] == [[0, 1], [2, 3]]
        epoch = coordinator.map["epoch"]
        listen(coordinator, now_s, LEASE_S - 0.5)
        assert beat(0, [0, 1]) == [2, 1]
        listen(coordinator, now_s, 1.0)
        assert beat(0, [0, 1]) == [2, 0]  # scheduler 1 is silent
        assert beat(1, None, "again") == [2, 0]  # it starts again, elsewhere
        assert coordinator.map["groups"][1]["scheduler"] == "again"
        assert coordinator.map["epoch"] == epoch + 1
        assert beat(1, [2, 1], "again") == [2, 2]  # worker 1 was started again there
        assert beat(0, []) == [0, 2]
        assert [each["workers"] for each in coordinator.map["groups"]] == [[0], [1, 2, 3]]
        with pytest.raises(ValueError, match="has groups 0 to 1; give the coordinator --num-g"):
            beat(2, None)
        for _ in range(4):  # a second scheduler of group 0 is not heard
            beat(0, [4, 5], "second")
            assert beat(0, [0])[0] == 1
            assert coordinator.map["groups"][0]["workers"] == [0]
            listen(coordinator, now_s, 0.5 * LEASE_S)
        beat(0, [0])
        listen(coordinator, now_s, 0.125)
        with pytest.raises(ValueError, match="the name scheduler0; give each scheduler its own"):
            beat(0, [4, 5], "second")
    finally:
        coordinator.close()


def test_a_copy_of_before_another_was_the_backup_does_not_count(tmp_path: Path) -> None:
    """Of three servers, one that was the backup twice has lost what came in between."""
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(3, "job", tmp_path / "journal", *own)

    def beat(name: str, synced: list[tuple[int, int]]) -> None:
        fields = {"name": name, "role": "server", "address": name, "incarnation": name}
        coordinator.handle(b"", WireMessage("beat", {**fields, "job": "job", "synced": synced}))

    try:
        for name in "abc":
            beat(name, [])
        before = coordinator.map["epoch"]
        primary, backup = coordinator.map["holders"][0]
        (third,) = set("abc") - {primary, backup}
        beat(backup, [(0, before)])
        coordinator.map["holders"][0] = [primary, third]
        coordinator.evict([third])
        assert coordinator.map["holders"][0] == [primary, backup]
        coordinator.change("the third has gone")
        beat(backup, [(0, before)])
        assert (0, backup) not in coordinator.synced
        beat(backup, [(0, coordinator.map["epoch"])])
        assert (0, backup) in coordinator.synced
    finally:
        coordinator.close()


@pytest.mark.parametrize("has_copies", [True, False])
def test_a_server_that_joins_again_is_the_backup_at_the_next_loss(
    has_copies: bool, tmp_path: Path
) -> None:
    """Until then each shard has two holders. Copies of before its loss do not count."""
    said = list[str]()
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", said.append)
    coordinator = Coordinator(3, "job", tmp_path / "journal", *own)

    def holders() -> list[list[str]]:
        return coordinator.map["holders"]

    def beat(name: str, has_copies: bool = True) -> None:
        since: list[int] = coordinator.map["since"]
        synced = [(shard, since[shard]) for shard, of in enumerate(holders()) if name in of[1:]]
        fields = {"name": name, "role": "server", "address": name, "incarnation": name}
        more = {"job": "job", "synced": synced * has_copies}
        coordinator.handle(b"", WireMessage("beat", {**fields, **more}))

    try:
        for name in "abc" * 2:
            beat(name)
        assert any("b" in of[1:] for of in holders())
        coordinator.evict(["b"])
        for name in "acb":
            beat(name)
        assert [set(of) for of in holders()] == [{"a", "c"}] * 3
        coordinator.evict(["c"])
        assert holders() == [["a", "b"]] * 3, "no push is acknowledged before b has it"
        beat("b", has_copies)
        coordinator.evict(["a"])
        assert [of[0] for of in holders()] == ["b" if has_copies else "a"] * 3
        for shard in range(3):
            lost = f"shard {shard} is lost with a: b has no full copy yet"
            assert (lost in said) != has_copies
    finally:
        coordinator.close()


def test_a_backup_forgets_a_copy_that_is_older_than_its_office(tmp_path: Path) -> None:
    own = ("b", Secret.new(), f"ipc://{tmp_path}/b", lambda _: None)
    server = Server("job", f"ipc://{tmp_path}/coordinator", "1", *own)
    rest = {"term": 1, "addresses": {}, "holders": [["a", "b"]]}
    try:
        server.member.take({**rest, "epoch": 5, "since": [5]})
        server.replicas.synced[0] = 5
        server.member.take({**rest, "epoch": 6, "since": [5]})
        assert server.facts()["synced"] == [(0, 5)]
        server.member.take({**rest, "epoch": 9, "since": [8]})  # c was the backup in epochs 6 to 7
        assert server.facts()["synced"] == []
    finally:
        server.close()


def test_a_map_of_a_later_term_is_new_in_the_same_epoch(tmp_path: Path) -> None:
    own = ("a", Secret.new(), f"ipc://{tmp_path}/a", lambda _: None)
    server = Server("job", f"ipc://{tmp_path}/coordinator", "1", *own)
    rest = {"epoch": 5, "addresses": {"x": f"ipc://{tmp_path}/x"}, "since": [5]}
    try:
        server.member.take({**rest, "term": 1, "holders": [["a", "x"]]})
        assert server.replicas.backups
        server.member.take({**rest, "term": 2, "holders": [["a"]]})
        assert not server.replicas.backups
    finally:
        server.close()


def test_a_server_without_its_name_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for the name of a process that was killed, or another has got its name since."""
    own = ("a", Secret.new(), f"ipc://{tmp_path}/a", lambda _: None)
    server, said = Server("job", f"ipc://{tmp_path}/coordinator", "2", *own), list[str]()
    monkeypatch.setattr(server.listener, "send", lambda _, message: said.append(message.kind))
    rest = {"term": 1, "addresses": {}, "since": [1, 1], "holders": [["a", "b"], ["b", "a"]]}
    asked = {"q": 1, "is_known": True, "needed": 0, "recipes": []}
    copied = {"epoch": 5, "sent": 0}
    try:
        for epoch, (incarnation, answers) in enumerate(
            [("1", ["moved", "fenced"]), ("2", ["empty", "gap"]), ("3", ["moved", "fenced"])], 5
        ):
            server.member.take({**rest, "epoch": epoch, "incarnations": {"a": incarnation}})
            server.handle(b"", WireMessage("pull", {**asked, "shard": 0}))
            server.handle(b"", WireMessage("where", {**copied, "shard": 1}))
            assert said == answers
            said.clear()
    finally:
        server.close()


@pytest.mark.parametrize(("holders", "is_answered"), [(["a"], True), (["b", "a"], False)])
def test_a_primary_that_is_replaced_acknowledges_nothing(
    holders: list[str], is_answered: bool, tmp_path: Path
) -> None:
    own = ("a", Secret.new(), f"ipc://{tmp_path}/a", lambda _: None)
    server, found = Server("job", f"ipc://{tmp_path}/coordinator", "1", *own), list[int]()
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in "ab"}
    rest = {"term": 1, "addresses": addresses, "since": [1]}
    shard = {"sizes": [1], "dtype": "float32", "rule": {"name": "sgd"}, "p": 2.0}
    try:
        server.member.take({**rest, "epoch": 1, "holders": [["a", "b"]]})
        spec = {**shard, "consistency": {"kind": "ps", "num_slots": 1}}
        server.replicas.shards[0] = Shard(spec, [torch.zeros(1)])
        server.replicas.after(0, lambda: found.append(1))
        assert not found
        server.member.take({**rest, "epoch": 2, "holders": [holders]})
        assert bool(found) == is_answered
    finally:
        server.close()
