"""The workers of a job of parameter servers, each in a thread of this process, and lost servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.server.consistency import Consistency
from phalanx.server.coordinator import Coordinator
from phalanx.server.processes import LocalRoles


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
