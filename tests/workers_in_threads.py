"""The workers of a job of parameter servers, each in a thread of this process, and lost servers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from phalanx.server import coordinator, liveness, replica, requests, role
from phalanx.server.consistency import Consistency
from phalanx.server.coordinator import Coordinator
from phalanx.server.processes import LocalRoles

CLOCKS = {
    "RESEND_S": 0.05, "MOST_RESEND_S": 0.4, "BEAT_S": 0.05, "TICK_S": 0.01,
    "LEASE_S": 1e6,
}  # fmt: skip
"""Seconds of constants of the modules of a job, in tests: no load makes a lease expire."""


@pytest.fixture
def fast_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have roles and workers ask again, beat and look up ten times as often, and lose nobody."""
    for module in (coordinator, liveness, replica, requests, role):
        for name in CLOCKS.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, CLOCKS[name])


def run_workers(
    work: Callable[..., None],
    made: LocalRoles,
    consistency: Consistency,
    num_steps: int,
    at: dict[int, Any],
) -> dict[int, Any]:
    """Return by worker what `work` has put into its dictionary `out`, which is no traceback."""
    out: dict[int, Any] = {}
    given = [
        (made, worker, consistency, num_steps, out, at) for worker in range(consistency.num_slots)
    ]
    threads = [threading.Thread(target=work, args=each) for each in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(each, tuple) for each in out.values()), out
    assert len(out) == len(given)
    return out


def lose(made: LocalRoles, name: str) -> None:
    """Stop a server, and have the coordinator find at once that its lease is over."""
    made.stop(name)
    find_lost(made, name)


def lose_group(made: LocalRoles, group: int) -> None:
    """Stop the scheduler of a group, and have the coordinator find at once that it is lost."""
    made.stop(f"scheduler{group}")
    keeper = made.roles["coordinator"]
    assert isinstance(keeper, Coordinator)
    keeper._schedulers.leave(group)


def connections(log: str) -> dict[str, set[str]]:
    """Return of each process in the logs of a job the roles to which its sockets have connected."""
    found: dict[str, set[str]] = {}
    for process, to in re.findall(r"(\w+ ?\d): connected to \S+/(\w+)\n", log):
        found.setdefault(process, set()).add(to)
    return found


def allowed_connections(workers: Sequence[int]) -> dict[str, set[str]]:
    """Return what `connections` finds of two servers and of workers whose groups are `workers`."""
    servers = {"coordinator", "server0", "server1"}
    found = {f"worker {n}": {*servers, f"scheduler{group}"} for n, group in enumerate(workers)}
    found |= {f"scheduler{group}": {"coordinator"} for group in workers}
    return found | {name: servers - {name} for name in servers - {"coordinator"}}


def find_lost(made: LocalRoles, name: str) -> None:
    """Have the coordinator find that the lease of a server is over, though it may be alive."""
    keeper = made.roles["coordinator"]
    assert isinstance(keeper, Coordinator)

    def tick() -> None:
        if name in keeper.leases.renewed_s:
            keeper.leases.leave(name)
        Coordinator.tick(keeper)

    keeper.tick = tick
    while name in keeper.map["addresses"]:
        time.sleep(0.001)
    del keeper.tick
