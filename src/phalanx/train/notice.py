"""Say what a run is waiting for, where it waits for long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist

from phalanx.launch.heartbeat import PULSE

PATIENCE_S = 2.0
"""How long a person waits without a word."""


@contextmanager
def said_if_long(what: str) -> Generator[None]:
    """Print `what` on rank 0 if the block takes longer than a person waits without a word."""
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
    """Print a line, unless it is empty, on rank 0."""
    if line and dist.get_rank() == 0:
        _say(line)


@contextmanager
def compiling(is_asked: bool) -> Generator[None]:
    """Run what compiles the blocks on its way, if they are to be compiled at all.

    The compiler runs other programs for minutes, in one place of the code. So ranks that stand
    there are not reported as standing still.
    """
    if not is_asked:
        yield
        return
    with PULSE.waiting("compiling the blocks"), said_if_long("compiling the blocks"):
        yield


def _say(line: str) -> None:
    # The display of a run takes over standard output, and prints what comes there above its bar; a
    # console of our own would write to the terminal itself, within the line of the bar.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
