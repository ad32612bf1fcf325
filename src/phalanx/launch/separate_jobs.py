"""Run functions on this host, each in a separate job of one rank, under one supervisor.

A process that a signal ended, as `kill -9` does, may be restarted; a function that fails ends all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from phalanx.launch.failure import report
from phalanx.launch.local import (
    LEAVING_S,
    Rank,
    Supervisor,
    ended_ranks,
    prepare_server,
    start_ranks,
)
from phalanx.launch.rank import RankInfo, socket_folder
from phalanx.launch.signals import collected

Work = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""What messages call a process, its function, importable by name, and positional arguments."""


def run_supervised(
    works: Sequence[Work],
    beside: Sequence[Work] = (),
    *,
    device: str = "cpu",
    threads: int = 1,
    timeout_s: float = 600.0,
    max_restarts: int = 0,
    say_starting: Callable[[], None] | None = None,
) -> list[Any]:
    """Run each function of `works` in a process, and return the results of `works`.

    The functions of `beside` run no longer than `works`, such as services: one that still runs when
    all `works` have returned is ended. Processes that a signal has ended are restarted, at most
    `max_restarts` times in total. For the other arguments, and the errors, see `local.run_ranks`.
    """
    prepare_server()
    info = RankInfo(0, 1, 0, device, threads, timeout_s, socket_folder())
    with ended_ranks() as (ranks, late):
        for name, function, args in (*works, *beside):
            start_ranks(ranks, replace(info, name=name), function, args)
        names = [name for name, *_ in (*works, *beside)]
        with collected() as signals:
            supervisor = _RestartingSupervisor(ranks, signals, timeout_s, say_starting, names)
            supervisor.works, supervisor.num_works = (*works, *beside), len(works)
            supervisor.info, supervisor.max_restarts = info, max_restarts
            results = supervisor.watch()
    supervisor.raise_unheeded(late)
    return results[: len(works)]


class _RestartingSupervisor(Supervisor):
    """Supervisor that restarts a process that a signal has ended, also after a request to stop."""

    works: Sequence[Work]
    num_works: int
    info: RankInfo
    max_restarts: int

    @override
    def is_awaited(self) -> bool:
        return any(rank < self.num_works for rank in self.running.values())

    @override
    def restart_if_killed(self, rank: int) -> bool:
        process, line = self.ranks[rank]
        process.join(LEAVING_S)
        if not self.max_restarts or (process.exitcode or 0) >= 0:
            return False
        self.max_restarts -= 1
        report(f"process {process.pid} was ended by a signal; a new process replaces it")
        del self.running[line]
        line.close()
        started: list[Rank] = []
        name, function, args = self.works[rank]
        start_ranks(started, replace(self.info, name=name), function, args)
        self.ranks[rank] = started[0]
        self.running[started[0][1]] = rank
        if self.stop_signal:  # the job ends once this process has, which may have to save
            started[0][1].send(self.stop_signal)
        return True
