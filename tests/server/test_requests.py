"""What a worker says while it waits, and how it hears that the job is to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from phalanx.errors import TrainingError
from phalanx.server import coordinator, requests
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.message import WireMessage
from phalanx.server.processes import local_roles
from phalanx.server.requests import JobAddress, JobEnded, JobStopped
from phalanx.server.secret import Secret
from workers_in_threads import fast_clocks

__all__ = ["fast_clocks"]  # a fixture

pytestmark = pytest.mark.usefixtures("fast_clocks")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What workers report."""
    found = list[str]()
    monkeypatch.setattr(requests, "report", found.append)
    return found


@contextmanager
def workers(num: int) -> Generator[list[Client]]:
    """Workers of a job that has servers, and no weights; each is a group of its own."""
    with local_roles(2, num) as made:
        own = (Consistency("ps", num), (0, 5))
        joined = [Client(made.meeting, each, *own) for each in range(num)]
        for each in joined:
            each.ask_scheduler("claim", clock=0)
        try:
            yield joined
        finally:
            for each in joined:
                each.close()


WAIT = {0: WireMessage("totals", {"needed": 1})}


def test_a_worker_names_another_that_is_there_and_pushes_nothing(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LATE_S", 0.05)
    monkeypatch.setattr(JobAddress, "is_on_one_host", False)
    with workers(2) as (first, _):
        first.requests._timeout_s = 1.0
        with pytest.raises(TrainingError, match="has waited 1 s"):
            first.requests.ask(WAIT)
    words = "worker 0 has waited 0.05 s for push 1 of worker 1, whose process is alive"
    assert any(words in line for line in lines)  # the other worker may wait as well


def test_a_worker_that_waits_hears_that_a_signal_ends_the_job() -> None:
    with workers(2) as (first, second):
        stopping = threading.Timer(
            0.1, lambda: first.ask_scheduler("stop", signum=int(signal.SIGTERM))
        )
        stopping.start()
        with pytest.raises(JobStopped) as stopped:
            second.requests.ask(WAIT)
        stopping.join()
        assert stopped.value.signum == signal.SIGTERM
        second.leave()
        while first.leave(signal.SIGTERM) > 0:
            time.sleep(0.001)


def test_a_server_that_comes_back_between_requests_is_not_lost_from_the_first_loss_on() -> None:
    with workers(1) as (first,):
        name = first.requests.map["holders"][0][0]
        of_all = first.requests.map["addresses"]
        of_others = {other: address for other, address in of_all.items() if other != name}

        def take(addresses: dict[str, str]) -> None:
            later = {"epoch": first.requests.map["epoch"] + 1, "addresses": addresses}
            first.requests._take({**first.requests.map, **later})

        def check(now_s: float) -> None:
            first.requests._clock.now_s = now_s
            first.requests._check_lost(0)

        take(of_others)
        for now_s in (0.0, requests.UNREPLICATED_LOSS_S):
            check(now_s)
        take(of_all)  # a request is answered before the next check
        take(of_others)
        for now_s in (1e6, 1e6 + requests.UNREPLICATED_LOSS_S):
            check(now_s)
        with pytest.raises(TrainingError, match=f"^{name} was lost"):
            check(2e6)


def test_a_worker_that_is_answered_at_once_hears_of_it_too() -> None:
    with workers(2) as (first, second):
        first.ask_scheduler("stop", signum=int(signal.SIGTERM))
        with pytest.raises(JobStopped):
            while True:  # its beats hear of it
                second.ask_scheduler("stats")
        second.leave()
        second.ask_scheduler("stats")  # who has left may ask


def test_a_worker_says_whom_it_waits_for_to_begin(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SILENT_S", 0.05)
    nobody = JobAddress("tcp://127.0.0.1:9", Secret.new())
    with pytest.raises(TrainingError, match="worker 3 has waited in vain for the servers: the co"):
        Client(nobody, 3, Consistency("ps", 4), (0, 5), timeout_s=0.5)
    assert "worker 3 waits for the servers: the coordinator at tcp://127.0.0.1:9 does" in lines[0]


def test_a_worker_of_a_job_that_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "BEAT_S", 1e9)  # it stays
    with workers(1) as (first,):
        first.end()
        with pytest.raises(TrainingError, match="has ended; a new job needs"):
            Client(first.requests._meeting, 0, Consistency("ps", 1), (0, 5))


def test_a_worker_whose_scheduler_is_lost_ends_with_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "BEAT_S", 1e9)  # it stays
    with local_roles(1, 2) as made:
        own = (Consistency("ps", 2), (0, 5))
        first, second = (Client(made.meeting, each, *own) for each in range(2))
        assert [each.requests.group for each in (first, second)] == [0, 1]
        made.stop("scheduler1")
        ending = threading.Timer(0.1, first.end)
        ending.start()
        with pytest.raises(JobEnded, match="has ended"):
            second.ask_scheduler("claim", clock=0)
        ending.join()
        for each in (first, second):
            each.close()


def test_a_worker_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(1) as (first,):
        assert first.requests.map["protocol"] == requests.PROTOCOL
        said = rf"has version {requests.PROTOCOL} of .*, but this worker has version 9;"
        monkeypatch.setattr(requests, "PROTOCOL", 9)
        with pytest.raises(TrainingError, match=said):
            Client(first.requests._meeting, 0, Consistency("ps", 1), (0, 5))
