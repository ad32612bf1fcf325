"""phalanx doctor: what it finds, what it says, and what it says when ranks cannot meet."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing

import pytest

from phalanx.cli import doctor, doctor_hosts
from phalanx.cli.main import main
from phalanx.errors import RankFailed
from phalanx.launch import link
from phalanx.launch.link import Responder
from phalanx.report.terminal import Terminal


def test_doctor_lets_two_processes_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["self_test"]["passed"] and found["self_test"]["seconds"] > 0
    assert found["backends"]["gloo"]
    assert found["versions"]["torch"] and found["packages"]["rich"]


def test_a_failed_self_test_is_shown_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_ranks(*_: object, **__: object) -> None:
        raise RankFailed(1, "no route")

    monkeypatch.setattr("phalanx.launch.local.run_ranks", run_ranks)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "no route" in text
    assert max(map(len, text.splitlines())) <= 100


def test_wrong_sums_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.local.run_ranks", lambda *_, **__: [(0.0, 1.0), (3.0, 1.0)])
    result = doctor.self_test()
    assert not result["passed"]
    assert "wrong sums: [0.0, 3.0]" in result["error"]


def test_doctor_names_the_nearest_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jsn"]) == 2
    assert "did you mean '--json'?" in capsys.readouterr().err


def test_no_stranger_ends_listen_or_leaves_something_behind() -> None:
    with closing(Responder()) as responder:  # a port that is free once it is closed
        port = responder.port
    threading.Thread(target=doctor_hosts.listen, args=(port, Terminal()), daemon=True).start()
    while not link.reach("b", "127.0.0.1", port).text.endswith("is open"):
        time.sleep(0.01)
    for request in (
        {"do": "way"},
        {"do": "mark", "folder": "/tmp", "name": "a"},
        {"do": "bandwidth", "peer": "b", "address": "127.0.0.1", "port": port},
        [[]],
    ):
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(f"{json.dumps(request)}\n".encode())
            assert connection.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(b"[" * 60_000 + b"\n")
        assert connection.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(b'{"do": "respond", "ports": [0]}\n')
        [left] = json.loads(connection.makefile().readline())["answer"]
    while not link.reach("b", "127.0.0.1", left).text.startswith("nobody listens"):
        time.sleep(0.01)
