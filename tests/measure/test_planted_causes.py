"""A cause that a test plants in one rank, stage, host or link is the cause that the run names.

The ranks, their data and their messages are real; a cause is a sleep, or a rank that is stopped
again and again.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import BatchConfig
from phalanx.launch.local import run_ranks
from phalanx.train import loop
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.report.summary import Summary
from phalanx.train.text import TextSession
from small_run import SHAPE, records, small_run

SLEEP_S = 0.06

STOPS = """
import os, signal, sys, time

def end_stops(*_):
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    os._exit(0)

signal.signal(signal.SIGTERM, end_stops)
end = time.monotonic() + 120
while time.monotonic() < end and os.getppid() == int(sys.argv[1]):
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.012)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.008)
"""
"""Lets its parent run 2 of 5 times."""


def before(target: Any, name: str, act: Callable[[], object]) -> None:
    """Call `act` before each call of a method."""
    method = getattr(target, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    setattr(target, name, wrapped)


def sleep() -> None:
    time.sleep(SLEEP_S)


class SlowWork:
    """A collective that ends late."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        sleep()
        if self.work is not None:
            self.work.wait()


def plant(cause: str, session: TextSession) -> None:
    """Plant a cause in this rank, if it is the one that the cause names."""
    rank, step, number = session.comm.rank, session.step, itertools.count()

    def turns() -> None:
        if next(number) % session.comm.size("job") == rank:
            sleep()

    def seldom() -> None:
        if next(number) % 10 == 5:
            time.sleep(4 * SLEEP_S)

    def stop() -> None:
        stops = subprocess.Popen([sys.executable, "-c", STOPS, str(os.getpid())])
        before(session, "close", stops.terminate)

    def hook() -> None:
        next(step.model.parameters()).register_hook(lambda _: sleep())  # pyright: ignore

    in_forward = type(step.objective), "loss_sum", sleep
    plants: dict[str, tuple[bool, Callable[[], object]]] = {
        "loader": (rank == 1, lambda: before(session, "next_microbatches", sleep)),
        "forward": (rank == 2, lambda: before(*in_forward)),
        "stage": (session.comm.coord("pp") == 1, lambda: before(*in_forward)),
        "host": (rank >= 2, lambda: before(*in_forward)),
        "optimizer": (rank == 0, lambda: before(step, "update", sleep)),
        "between": (rank == 1, lambda: before(session, "stepped", sleep)),
        "turns": (True, lambda: before(session, "next_microbatches", turns)),
        "seldom": (rank == 1, lambda: before(session, "next_microbatches", seldom)),
        "half a core": (rank == 1, stop),
        "save": (rank == 1, lambda: before(session, "begin_save", sleep)),
        "evaluation": (rank == 1, lambda: before(session, "validation_batches", sleep)),
        "backward": (rank == 3, hook),
        "none": (False, sleep),
    }
    if cause.startswith("link"):
        engine: Any = session.comm.engine(cause[-2:])
        begin: Callable[..., Any] = engine.begin

        def late(*args: Any, **options: Any) -> SlowWork:
            return SlowWork(begin(*args, **options))

        engine.begin = late
        return
    is_of_this_rank, act = plants[cause]
    if is_of_this_rank:
        act()


def trained(job: Job, cause: str) -> Summary:
    """Train on this rank with a planted cause; ranks 2 and 3 are on another host, if it is one."""
    name = socket.gethostname()
    if cause == "host" and os.environ.get("RANK") in ("2", "3"):
        name = "b"
    socket.gethostname = lambda: name
    session = TextSession(job)
    plant(cause, session)
    summary = loop.train(session)
    assert isinstance(summary, Summary)
    return summary


def run(folder: Path, cause: str, strategy: str, steps: int, **settings: Any) -> Summary:
    """Return the summary of a run with a planted cause."""
    shape = dataclasses.replace(SHAPE, num_layers=4 if "pp4" in strategy else 2, num_kv_heads=2)
    batch = BatchConfig(global_size=8, microbatch=2)
    config = small_run(folder, strategy=strategy, steps=steps, shape=shape, batch=batch, **settings)
    job = resolve(config)
    return run_ranks(trained, job.strategy.num_ranks, job, cause, threads=1)[0]


HOST = socket.gethostname()

CAUSES = [
    ("loader", "dp2", f"Rank 1 on host {HOST} is late in all steps: data takes"),
    ("loader", "pp4", f"Stage 1 (rank 1 on host {HOST}) is late in all steps: data takes"),
    ("forward", "dp4", f"Rank 2 on host {HOST} is late in all steps: forward takes"),
    ("forward", "pp4", f"Stage 2 (rank 2 on host {HOST}) is late in all steps: forward takes"),
    ("forward", "pp2,dp2", f"Rank 2 on host {HOST} is late in all steps: forward takes"),
    ("stage", "pp2,dp2", f"Stage 1 (ranks 2 and 3 on host {HOST}) is late in all steps: forward"),
    ("backward", "dp4", f"Rank 3 on host {HOST} is late in all steps: backward takes"),
    ("optimizer", "dp2,tp2", f"Rank 0 on host {HOST} is late in all steps: optimizer takes"),
    ("between", "dp2", f"Rank 1 on host {HOST} is late in all steps: other takes"),
    ("link of dp", "dp2,tp2", f"between ranks 0 to 3 on host {HOST}: communication over dp takes"),
    ("link of tp", "dp2,tp2", f"between ranks 0 to 3 on host {HOST}: communication over tp takes"),
    ("half a core", "dp2", f"Rank 1 on host {HOST} is late in all steps: "),
    ("host", "dp4", "Host b (ranks 2 and 3) is late in all steps: forward takes"),
    ("turns", "dp4", f"Another of ranks 0 to 3 on host {HOST} is late each step: data takes"),
    ("seldom", "dp2", f"Rank 1 on host {HOST} is late in few steps ("),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "strategy", "words"), CAUSES)
def test_the_summary_names_the_planted_cause_first(
    cause: str, strategy: str, words: str, tmp_path: Path
) -> None:
    summary = run(tmp_path, cause, strategy, 53 if cause == "seldom" else 16)
    first = " ".join(summary.render(report=True).splitlines()[:3])
    assert words in first
    (record,) = records(tmp_path / "run", "summary")
    assert record["straggler"] == summary.straggler


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"save": "every=3"}, {"eval_every": 3}])
def test_a_slow_save_or_evaluation_is_no_straggler(
    settings: dict[str, int], tmp_path: Path
) -> None:
    cause = "save" if "save" in settings else "evaluation"
    assert run(tmp_path, cause, "dp2", 24, **settings).straggler is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp2", "dp4", "dp2,tp2", "fsdp2", "pp2", "pp4", "pp2,dp2"])
@pytest.mark.parametrize("number", range(3))
def test_a_run_without_a_cause_accuses_nobody(strategy: str, number: int, tmp_path: Path) -> None:
    assert run(tmp_path, "none", strategy, 20).straggler is None
