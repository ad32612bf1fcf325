"""A whole job in threads: servers that are lost, and messages that are lost, doubled, reordered."""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import zmq

from lossy_messages import lose_messages
from marks import by_hand
from phalanx.errors import TrainingError
from phalanx.server import liveness, requests
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.coordinator import Coordinator
from phalanx.server.message import WireMessage
from phalanx.server.message_table import MESSAGES, PROTOCOL, Dispatch
from phalanx.server.processes import LocalRoles, local_roles
from phalanx.server.role import Role
from phalanx.server.secret import Secret
from phalanx.server.shard_server import Server
from phalanx.server.shared import IS_POSSIBLE
from phalanx.server.task_scheduler import TaskScheduler
from phalanx.server.wire import Listener
from workers_in_threads import fast_clocks, lose, run_workers

__all__ = ["fast_clocks"]  # a fixture

pytestmark = pytest.mark.usefixtures("fast_clocks")

SIZES = [700, 37]


@pytest.fixture(autouse=True)
def as_in_the_table(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Compare each message that a role gets, and each of its answers, with the table."""
    wrong, method, reply = list[str](), Dispatch.method, Role.reply

    def get(dispatch: Dispatch, message: WireMessage) -> Any:
        found = method(dispatch, message)
        row = dispatch._rows[message.kind]
        more = message.fields.keys() - row.needed - row.optional
        wrong.extend(f"{message.kind} {name}" for name in more)
        return found

    def answer(role: Role, peer: bytes, request: WireMessage, made: WireMessage) -> None:
        rows = {**MESSAGES[role.kind], **(MESSAGES["backup"] if role.kind == "server" else {})}
        fields = rows[request.kind].answers.get(made.kind) if request.kind in rows else None
        if fields is None:
            wrong.extend([f"{request.kind} -> {made.kind}"] * (made.kind != "refused"))
        elif made.kind != "map":
            names = {name.rstrip("?") for name in fields}
            needed = {name for name in fields if not name.endswith("?")}
            if not needed <= made.fields.keys() <= names:
                wrong.append(f"{request.kind} -> {made.kind} {sorted(made.fields)}")
        reply(role, peer, request, made)

    monkeypatch.setattr(Dispatch, "method", get)
    monkeypatch.setattr(Role, "reply", answer)
    yield
    assert not wrong


def flats() -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.float64) for size in SIZES]


def work(
    made: LocalRoles,
    worker: int,
    consistency: Consistency,
    num_steps: int,
    out: dict[int, Any],
    at: dict[int, Any],
) -> None:
    """Push whole numbers, so that sums are exact; the action `at` a clock comes before it."""
    try:
        client = Client(made.meeting, worker, consistency, (0, num_steps), timeout_s=60)
        client.lay_out(SIZES, torch.float64, chunk_bytes=800)
        weights = flats()
        if worker == 0:
            client.create(weights, {"name": "sgd"}, 2.0)
        version = client.pull(weights, 0)
        for clock in range(num_steps):
            if worker == 0 and clock in at:
                at[clock]()
            assert client.ask_scheduler("claim", clock=clock)["is_mine"]
            grads = [torch.full_like(flat, float(3**worker + clock)) for flat in weights]
            numbers = {
                "base": version,
                "tokens": 1.0,
                "loss": 1.0,
                "rate": -float(consistency.num_slots),
            }
            client.push(clock, worker, grads, **numbers)
            needed = consistency.needs(clock + 1)
            recipes = [
                (v, -float(consistency.num_slots), 1.0)
                for v in sorted(client.totals(needed) if not consistency.is_asynchronous else ())
                if v >= client.applied
            ]
            version = client.pull(weights, needed, recipes)
        client.ask_scheduler("leave")
        out[worker] = client, weights
    except BaseException:
        out[worker] = traceback.format_exc()


def run(
    made: LocalRoles, consistency: Consistency, num_steps: int, at: dict[int, Callable[[], Any]]
) -> list[Client]:
    """Run the workers; check that each push is in the weights once."""
    out = run_workers(work, made, consistency, num_steps, at)
    clients: list[Client] = [out[worker][0] for worker in sorted(out)]
    weights = flats()
    totals = clients[0].totals(0)
    clients[0].pull(weights, 0, [(v, -float(consistency.num_slots), 1.0) for v in sorted(totals)])
    workers, clocks = range(consistency.num_slots), range(num_steps)
    due = sum(3**worker + clock for worker in workers for clock in clocks)
    for flat in weights:
        assert flat.unique().tolist() == [float(due)], made.log.read_text()
    return clients


def end(clients: list[Client]) -> None:
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    "consistency",
    [
        Consistency("ssp", 3, 2),
        by_hand(Consistency("ps", 3)),
        by_hand(Consistency("async", 3)),
    ],
)
def test_whole_numbers_survive_lost_doubled_and_reordered_messages(
    consistency: Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_messages(monkeypatch, drop=0.1, double=0.05, reorder=0.05, seed=3)
    with local_roles(2) as made:
        end(run(made, consistency, 4, {}))


def test_a_server_that_is_lost_is_replaced_by_its_backup_and_comes_back() -> None:
    with local_roles(2) as made:
        keeper = made.roles["coordinator"]
        assert isinstance(keeper, Coordinator)

        def lose_server() -> None:
            while (1, "server0") not in keeper.synced:  # its next beat says that it has a copy
                time.sleep(0.001)
            lose(made, "server1")

        end(run(made, Consistency("ps", 2), 9, {3: lose_server, 6: lambda: made.start("server1")}))
        log = made.log.read_text()
        assert "server1 lost" in log and "shard 1 is lost" not in log and "server0 lost" not in log


def test_nobody_is_lost_and_nobody_gives_up_where_a_whole_job_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, late_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late_s[0])
    monkeypatch.setattr(liveness, "LEASE_S", 100.0)

    def suspend() -> None:
        late_s[0] += 1000.0

    with local_roles(2) as made:
        end(run(made, Consistency("ps", 2), 6, {2: suspend, 4: suspend}))
        assert " lost" not in made.log.read_text()


def test_coordinator_and_scheduler_may_go_and_come_back() -> None:
    with local_roles(2, 2) as made:

        def again(name: str) -> None:
            made.stop(name)
            made.start(name)

        names = {2: "coordinator", 4: "scheduler0", 5: "scheduler1"}
        at = {clock: functools.partial(again, name) for clock, name in names.items()}
        end(run(made, Consistency("ps", 2), 7, at))
        assert "term 2 begins" in made.log.read_text()
        for name, worker in (("scheduler0", 0), ("scheduler1", 1)):
            scheduler = made.roles[name]
            assert isinstance(scheduler, TaskScheduler) and scheduler.tasks is not None
            assert scheduler.tasks.workers == {worker}
            # it knows also what was pushed before it began
            assert scheduler.tasks.done.below[worker] == 7


def test_asynchronous_groups_push_each_of_their_tasks_once() -> None:
    with local_roles(2, 2) as made:
        end(run(made, Consistency("async", 3), 4, {}))
        schedulers = [made.roles[f"scheduler{group}"] for group in range(2)]
        workers = [each.tasks.workers for each in schedulers if isinstance(each, TaskScheduler)
                   and each.tasks is not None]  # fmt: skip
        assert workers == [{0, 1}, {2}]


@pytest.mark.parametrize(
    ("fact", "why"),
    [
        ({"job": "another job"}, "is of job another job, but this is job "),
        (
            {"protocol": PROTOCOL + 1, "job": "another job"},
            f"has version {PROTOCOL + 1} of the message protocol, but the coordinator has version "
            f"{PROTOCOL}; install the same version of phalanx on all hosts",
        ),
    ],
)
def test_a_server_of_another_job_or_version_is_refused(
    fact: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_roles(1) as made:
        common = ("x", made.meeting.secret, f"ipc://{made.folder}/x", lambda _: None)
        other = Server(made.meeting.secret.job, made.meeting.coordinator, "1", *common)
        facts = other.facts() | fact
        monkeypatch.setattr(other.member, "facts", lambda: facts)
        thread = threading.Thread(target=other.run)
        thread.start()
        thread.join(20)
        assert f"the coordinator refuses x: it {why}" in other.refusal
        assert f"refused: x {why}" in made.log.read_text()


def test_weights_of_another_shape_are_refused() -> None:
    with local_roles(1) as made:
        client = one_worker(made)
        client.lay_out([11], torch.float64)
        with pytest.raises(TrainingError, match="a different model, optimizer or strategy"):
            client.create([torch.zeros(11, dtype=torch.float64)], {"name": "sgd"}, 2.0)
        client.close()


def one_worker(made: LocalRoles) -> Client:
    """Return the only worker of a job, which has given ten weights of 0 to the servers."""
    client = Client(made.meeting, 0, Consistency("ps", 1), (0, 100), timeout_s=20)
    client.lay_out([10], torch.float64)
    client.create([torch.zeros(10, dtype=torch.float64)], {"name": "sgd"}, 2.0)
    return client


@pytest.mark.skipif(not IS_POSSIBLE, reason="memory of others is read on Linux and x86")
def test_weights_that_change_too_often_to_be_read_are_sent_once() -> None:
    """Those of a server that is at a change; the next pull reads its memory again."""
    with local_roles(1) as made:
        client = Client(made.meeting, 0, Consistency("async", 1), (0, 100), timeout_s=20)
        client.lay_out([10], torch.float64, tables=[(7, 3)])
        first = [torch.arange(10.0).double(), torch.arange(21.0).double()]
        rule = {"name": "sgd", "tables": "sgd", "tables_rate": 1.0}
        client.create(first, rule, 2.0)
        server = made.roles["server0"]
        assert isinstance(server, Server)
        memory = server.replicas.shards[0].memory
        assert memory is not None
        for received_bytes in (80 + 48, 0):
            client.received_bytes = 0
            weights, table = [torch.zeros(10).double()], torch.zeros(7, 3).double()
            with memory.changing() if received_bytes else nullcontext():
                client.pull(weights, 0)
                client.pull_rows(0, torch.tensor([1, 5]), table, 0)
            assert torch.equal(weights[0], first[0])
            assert torch.equal(table[[1, 5]], first[1].view(7, 3)[[1, 5]]) and not table[0].any()
            assert client.is_shared and client.received_bytes == received_bytes
        client.close()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_shard_that_is_lost_with_its_only_server_ends_the_job(
    comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_roles(1) as made:
        client, weights = one_worker(made), [torch.zeros(10, dtype=torch.float64)]
        client.pull(weights, 0)
        lose(made, "server0")
        monkeypatch.setattr(requests, "UNREPLICATED_LOSS_S", 0.3)
        if comes_back:
            made.start("server0")
        with pytest.raises(TrainingError, match=r"^server0 was lost with its part of the weights"):
            client.pull(weights, 1)
        client.close()


def test_what_peers_leave_behind_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_messages(monkeypatch, double=0.5, seed=1)
    with local_roles(1) as made:
        for _ in range(4):
            client, weights = one_worker(made), [torch.zeros(10, dtype=torch.float64)]
            client.is_shared = False
            for _ in range(5):
                client.pull(weights, 0)
            client.read([[flat] for flat in weights])  # what was sent twice has come by now
            assert not client.requests._inbox and not client.requests._waiting
            client.close()
        client = one_worker(made)
        gone = f"ipc://{made.folder}/gone"
        client.requests._link(gone)
        made.start("server1")
        while "server1" not in client.requests.map["addresses"]:
            client.requests._ask_map()
            client.requests._hear()
        links = client.requests._links
        assert gone not in links and made.meeting.coordinator in links
        client.close()


def test_a_peer_that_answers_nonsense_does_not_end_a_role() -> None:
    """Neither bytes that are no message nor a message that lacks what it should say."""
    with local_roles(1) as made:
        secret, lines = Secret.new(), list[str]()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        own = (secret, f"ipc://{made.folder}/strange", lambda _: None)
        strange = Listener(context, *own)
        given = ("x", secret, f"ipc://{made.folder}/x", lines.append)
        server = Server("job", strange.address, "1", *given)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not (found := [peer for peer, said in strange.receive() if said.kind == "beat"]):
            strange.socket.poll(10)
        peer = found[0]  # of the loop, which reads answers
        strange.socket.send_multipart([peer, b"\x80garbage\n"])
        strange.send(peer, WireMessage("map", {"epoch": 1}))
        strange.send(peer, WireMessage("refused", {"why": "enough"}))
        thread.join(20)
        strange.close()
        context.destroy(linger=0)
        assert server.is_over
        assert [line for line in lines if "header that cannot be read" in line]
        assert [line for line in lines if "ignored: 'map': KeyError: 'term'" in line]


@pytest.mark.slow
def test_weights_that_take_long_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker and a primary ask for news, which comes behind what is still on its way."""
    heard, handle = list[str](), Server.handle

    def slow(server: Server, peer: bytes, message: WireMessage) -> None:
        heard.append(message.kind)
        if message.tensors:
            time.sleep(0.5)
        handle(server, peer, message)

    monkeypatch.setattr(Server, "handle", slow)
    with local_roles(2) as made:
        client, weights = one_worker(made), [torch.zeros(10, dtype=torch.float64)]
        client.pull(weights, 0)
        heard.clear()  # of the time when servers did not know yet what they hold
        client.push(0, 0, weights, base=0, tokens=1.0, loss=0.0)
        client.pull(weights, 1, [(0, 0.1, 1.0)])
        client.close()
    assert heard.count("push") == heard.count("pull") == 2  # one a server
    assert heard.count("op") == 4 and "copy" not in heard
    assert heard.count("again") > 2
