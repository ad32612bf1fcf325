"""The checks of a link, on the loopback interface; faults of real links: test_doctor_hosts.py."""

from __future__ import annotations

import queue
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx.errors import PeerLost, TrainingError
from phalanx.launch import link
from phalanx.launch.link import Responder
from phalanx.launch.rank_env import RankEnv

HOST = socket.gethostname()


@pytest.fixture
def port() -> Generator[int]:
    responder = Responder()
    yield responder.port
    responder.close()


def test_a_responder_answers_what_a_sound_link_is_asked(port: int) -> None:
    packet, clock = link.passing("b", "127.0.0.1", port)
    assert packet.check == "MTU" and not packet.cure
    assert clock.check == "clock" and abs(clock.values["offset_s"]) < 1.0 and not clock.cure
    rate = link.bandwidth("b", "127.0.0.1", port, seconds=0.1, num_bytes=1 << 20, tries=3)
    assert rate.values["to_bytes_per_s"] > 1e6 and rate.values["from_bytes_per_s"] > 1e6
    reached = link.reach("b", "127.0.0.1", port)
    assert reached.text == f"b:{port} (127.0.0.1) is open" and not reached.cure


def test_a_responder_sends_no_more_than_it_is_asked_for(port: int) -> None:
    with link.asking("127.0.0.1", port, "send 1.0 100000") as connection:
        assert len(connection.makefile("rb").read()) == 100_000
    with link.asking("127.0.0.1", port, "remove everything") as connection:
        assert connection.recv(1) == b""


def test_a_packet_that_a_router_splits_has_arrived(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_two(connection: socket.socket, _: float, num_bytes: int) -> None:
        connection.sendall(bytes(num_bytes - 1))
        time.sleep(0.05)
        connection.sendall(bytes(1))

    monkeypatch.setattr(link, "_send", in_two)
    assert not next(link.passing("b", "127.0.0.1", port)).cure


def test_a_refused_port_is_no_firewall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    finding = link.reach("b", "127.0.0.1", port)
    assert finding.text.startswith(f"nobody listens at b:{port}") and not finding.cure


def test_an_unknown_name_ends_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolved_to(None))
    [finding] = link.way("nowhere")
    assert finding.is_end
    assert str(finding) == (
        f"the name nowhere is unknown on {HOST}; in /etc/hosts of {HOST}, add 'ADDRESS nowhere' "
        "with the address that `ip -brief address` shows on nowhere, or use the address in place "
        "of the name"
    )


def test_another_host_is_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolved_to("127.0.1.1"))
    [finding] = link.way("b")
    assert finding.is_end and f"b resolves to 127.0.1.1, {HOST} itself, on {HOST}" in finding.text
    monkeypatch.setattr(socket, "getfqdn", lambda: f"{HOST}.home")
    for name in (HOST, f"{HOST}.home"):  # a host may know itself by this address
        assert not next(link.way(name)).cure


def resolved_to(address: str | None) -> Callable[..., object]:
    def resolve(*_: object, **__: object) -> object:
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    return resolve


def test_one_slow_way_is_a_fault_and_a_fast_link_is_none() -> None:
    fast, slow = 940e6 / 8, 10e6 / 8
    assert "only the way from a to b is slow" in link.cure_of_slow("a", "b", slow, fast)
    assert "only the way from b to a is slow" in link.cure_of_slow("a", "b", fast, slow)
    assert "use a cable" in link.cure_of_slow("a", "b", slow, slow)
    assert link.cure_of_slow("a", "b", fast, fast / 2) == ""
    assert link.cure_of_slow("a", "b", 30 * fast, 3 * fast) == ""  # a busy host


def test_the_round_trip_is_that_of_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess("ping", 0, "time=9 ms\ntime=3 ms\ntime=1.5 ms\ntime=2 ms\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    *_, finding = link.way("127.0.0.1")
    assert finding.text == "least 1.5 ms, median 2 ms, 99 % 3 ms"


def test_a_host_with_ipv6_alone_has_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    monkeypatch.setattr(link, "_resolved", lambda _: "::1")
    with closing(Responder()) as responder:
        *_, route, reached = link.way(HOST, responder.port, pings=False)
        assert route.text.startswith("from ::1 by lo, MTU ") and not route.cure
        assert reached.text.endswith("is open")
        packet, clock = link.passing(HOST, "::1", responder.port)
        assert not packet.cure and not clock.cure


def checked(sizes: tuple[int, ...], *addresses: str) -> list[TrainingError]:
    """Check the links of hosts of so many ranks, at addresses; return what their ranks raise."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=60))

    def check(rank: int, first: int, size: int, address: str) -> TrainingError | None:
        env = RankEnv(rank, sum(sizes), rank - first, size)
        try:
            link.check_links(store.clone(), env, address)
        except TrainingError as error:
            return error
        return None

    with ThreadPoolExecutor(sum(sizes)) as threads:
        asked = [
            threads.submit(check, rank, sum(sizes[:number]), size, addresses[number])
            for number, size in enumerate(sizes)
            for rank in range(sum(sizes[:number]), sum(sizes[: number + 1]))
        ]
    return [error for each in asked if (error := each.result()) is not None]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2, 1)])
def test_each_host_checks_the_link_to_the_next(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def passing(peer: str, *_: object) -> Generator[link.Finding]:
        asked.append(peer)
        yield link.Finding("MTU", "packets vanish", cure="set one MTU", is_end=True)

    monkeypatch.setattr(link, "passing", passing)
    raised = checked(sizes, *["127.0.0.1"] * len(sizes))
    # Of two hosts, one measures; both first ranks say what is wrong.
    assert len(asked) == (1 if len(sizes) == 2 else len(sizes))
    assert [str(error) for error in raised] == ["packets vanish; set one MTU"] * len(sizes)
    assert not any(isinstance(error, PeerLost) for error in raised)


def test_a_host_of_no_known_address_is_not_checked() -> None:
    assert checked((1, 1), "", "") == []


def test_of_a_far_host_the_bandwidth_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "NEAR_S", 0.0)
    monkeypatch.setattr(link, "bandwidth", None)
    assert checked((1, 1), "127.0.0.1", "127.0.0.1") == []


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_host_that_does_not_answer_is_a_lost_peer_of_a_launched_job(
    is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reach(peer: str, *_: object) -> link.Finding:
        return link.Finding("port", f"no host answers: {peer}", cure="x", is_end=True)

    monkeypatch.setattr(link, "reach", reach)
    monkeypatch.setattr(link, "launched", lambda: object() if is_launched else None)
    raised = checked((1, 1), "127.0.0.1", "127.0.0.1")
    assert [type(error) for error in raised] == [PeerLost if is_launched else TrainingError] * 2


def test_a_waiting_rank_says_what_is_wrong_with_the_way_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(link, "LIMIT_S", 0.01)
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(link, "report", said.put)
    monkeypatch.setattr(socket, "getaddrinfo", resolved_to(None))
    with link.explained(RankEnv(1, 2, 0, 1)):
        words = said.get(timeout=60)
    assert words.startswith(
        f"waiting for the job's store: the name nowhere is unknown on {HOST}; in /etc/hosts"
    )
