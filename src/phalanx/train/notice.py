"""Print notices on rank 0, for example of operations that take long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist

from phalanx.launch.heartbeat import PULSE

PATIENCE_S = 2.0
"""Seconds that an operation may take before a notice is printed."""


@contextmanager
def notice_if_slow(what: str) -> Generator[None]:
    """Print `what` on rank 0 if the block takes longer than PATIENCE_S."""
    if dist.get_rank() != 0:
        yield
        return
    timer = threading.Timer(PATIENCE_S, lambda: _say(f"{what} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def announce(line: str) -> None:
    """Print a line on rank 0, unless it is empty."""
    if line and dist.get_rank() == 0:
        _say(line)


@contextmanager
def compiling(is_asked: bool) -> Generator[None]:
    """Mark a block that compiles the model, if `is_asked`, so that ranks are not reported as hung.

    The compiler may run subprocesses for minutes while the rank's stack does not change.
    """
    if not is_asked:
        yield
        return
    with PULSE.waiting("compiling the blocks"), notice_if_slow("compiling the blocks"):
        yield


def _say(line: str) -> None:
    # The progress display of a run redirects standard output and prints it above its bar; another
    # Console would write to the terminal directly, into the line of the bar.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
