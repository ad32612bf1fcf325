"""A cause that a test plants in one rank, stage, host or link is the cause that the run names."""

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

import torch

from phalanx.config import BatchConfig
from phalanx.launch.local import run_ranks
from phalanx.train import loop
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.report.summary import Summary
from phalanx.train.text import TextSession
from small_run import SHAPE, small_run

SLEEP_S = 0.04

STOPS = """
import os, signal, sys, time
end = time.monotonic() + 120
while time.monotonic() < end and os.getppid() == int(sys.argv[1]):
    os.kill(int(sys.argv[1]), signal.SIGSTOP); time.sleep(0.012)
    os.kill(int(sys.argv[1]), signal.SIGCONT); time.sleep(0.008)
"""
"""Lets its parent run 2 of 5 times."""


def before(target: Any, name: str, act: Callable[[], None], *, after: bool = False) -> None:
    """Call `act` before, or after, each call of a method."""
    method = getattr(target, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not after:
            act()
        result = method(*args, **kwargs)
        if after:
            act()
        return result

    setattr(target, name, wrapped)


def sleep() -> None:
    time.sleep(SLEEP_S)


class SlowWork:
    """A collective that ends late on every rank."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        time.sleep(SLEEP_S / 2)
        if self.work is not None:
            self.work.wait()


def plant(cause: str, session: TextSession) -> None:
    rank, step = session.comm.rank, session.step
    number = itertools.count()
    match cause:
        case "loader of rank 1" if rank == 1:
            before(session, "next_microbatches", sleep)
        case "forward of rank 2" | "forward of stage 2" if rank == 2:
            before(type(step.objective), "loss_sum", sleep)
        case "forward of stage 1" if session.comm.coord("pp") == 1:
            before(type(step.objective), "loss_sum", sleep)
        case "backward of rank 3" if rank == 3:
            weight = next(step.model.parameters())
            weight.register_hook(lambda _: sleep())
        case "optimizer of rank 0" if rank == 0:
            before(step, "update", sleep)
        case "between steps of rank 1" if rank == 1:
            before(session, "stepped", sleep)
        case "another rank each step":

            def some() -> None:
                if next(number) % session.comm.size("job") == rank:
                    sleep()

            before(session, "next_microbatches", some)
        case "every tenth step of rank 1" if rank == 1:

            def seldom() -> None:
                if next(number) % 10 == 5:
                    time.sleep(3 * SLEEP_S)

            before(session, "next_microbatches", seldom)
        case "half a core of rank 1" if rank == 1:
            stops = subprocess.Popen([sys.executable, "-c", STOPS, str(os.getpid())])
            before(session, "close", stops.kill)
        case "host b" if rank >= 2:
            before(type(step.objective), "loss_sum", sleep)
        case "link of dp" | "link of tp":
            axis = cause[-2:]
            engine = session.comm.engine(axis)
            begin = engine.begin
            engine.begin = lambda *a, **k: SlowWork(begin(*a, **k))  # pyright: ignore
        case "slow save" if rank == 1:
            before(session, "begin_save", sleep)
        case "slow evaluation" if rank == 1:
            before(session, "validation_batches", sleep)
        case _:
            pass


def trained(job: Job, cause: str) -> Summary:
    if cause == "host b" and torch.distributed.get_rank() >= 2:
        socket.gethostname = lambda: "b"
    session = TextSession(job)
    plant(cause, session)
    summary = loop.train(session)
    assert isinstance(summary, Summary)
    return summary


def run(folder: Path, cause: str, strategy: str, steps: int = 16, **settings: Any) -> Summary:
    shape = dataclasses.replace(SHAPE, num_layers=4 if "pp4" in strategy else 2, num_kv_heads=2)
    batch = BatchConfig(global_size=8, microbatch=2)
    config = small_run(folder, strategy=strategy, steps=steps, shape=shape, batch=batch, **settings)
    job = resolve(config)
    return run_ranks(trained, job.strategy.num_ranks, job, cause, threads=1)[0]
