"""A server that answers one message for long is there; one that never comes back is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.server import liveness, role, shard_server
from phalanx.server.coordinator import Coordinator
from phalanx.server.liveness import LEASE_S, TICK_S
from phalanx.server.message import WireMessage
from phalanx.server.secret import Secret
from phalanx.server.shard_server import Server

STEP_S = 4 * TICK_S
NUM_STEPS = round(2 * LEASE_S / STEP_S)


def test_a_server_is_there_while_it_answers_one_message_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now_s: list[float]
) -> None:
    for module in (liveness, role):
        monkeypatch.setattr(module, "BEAT_S", 0.01)
        monkeypatch.setattr(module, "TICK_S", 0.01)
    stuck_s = 4 * LEASE_S
    monkeypatch.setattr(shard_server, "STUCK_S", stuck_s)
    has_begun, may_end = threading.Event(), threading.Event()

    def compute(*_: Any) -> None:
        has_begun.set()
        may_end.wait()

    monkeypatch.setattr(Server, "handle", compute)
    own = (Secret.new(), f"ipc://{tmp_path}/coordinator", lambda _: None)
    coordinator = Coordinator(1, "job", tmp_path / "journal", *own)
    lines = list[str]()
    given = ("a", own[0], f"ipc://{tmp_path}/a", lines.append)
    server, stop = Server("job", coordinator.address, "1", *given), threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,), daemon=True)

    def turn() -> bool:
        """Have some time pass in which the coordinator listens; return whether `a` is there."""
        now_s[0] += STEP_S
        coordinator.run_once()
        return "a" in coordinator.map["addresses"]

    try:
        thread.start()
        while not turn():
            pass
        coordinator.link(server.address, lambda _: None).send(WireMessage("compute"))
        while not has_begun.is_set():
            coordinator.run_once()
        for _ in range(NUM_STEPS):
            assert coordinator.listener.socket.poll(20_000), "the server says nothing"
            assert turn()
        now_s[0] += 100 * stuck_s  # the process was stopped, and is not stuck
        for _ in range(2):
            assert coordinator.listener.socket.poll(20_000) and turn()
        while not (stuck := [line for line in lines if "at one message for" in line]):
            now_s[0] += STEP_S
            may_end.wait(0.001)
        while turn():
            pass
        assert len(stuck) == 1
        may_end.set()
        while not turn():
            pass
    finally:
        may_end.set()
        stop.set()
        thread.join()
        coordinator.close()
