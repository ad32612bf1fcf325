"""Delay each fork, such as of a DataLoader worker, until gloo's threads are asleep.

A gloo thread that frees a tensor enters the interpreter, and briefly holds the lock of the
interpreter's thread list without the GIL. With Python 3.11, a process forked at that moment
deadlocks: the child acquires this lock before it reinitializes it (`PyOS_AfterFork_Child`). This
happened to one in 200 to 500 DataLoaders that forked their workers right after a collective.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

WAIT_S = 0.2
"""Most time a fork waits for other threads, in seconds; OpenMP threads spin as long after work."""

_POLL_S = 0.0005


@functools.cache
def delay_forks_until_idle() -> None:
    """On Linux, make each fork wait, at most WAIT_S, until this process's other threads sleep."""
    if sys.platform == "linux":
        os.register_at_fork(before=await_sleep)


def await_sleep(wait_s: float = WAIT_S) -> bool:
    """Wait at most `wait_s` seconds until no other thread runs; return whether none does.

    A thread that sleeps, including one that waits for the GIL, holds no lock of the interpreter.
    """
    end_s = time.monotonic() + wait_s
    while is_awake := _is_another_awake():
        if time.monotonic() > end_s:
            break
        time.sleep(_POLL_S)
    return not is_awake


def _is_another_awake() -> bool:
    own = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            # The state follows the name, which may itself contain parentheses: proc(5).
            stat = Path(f"/proc/self/task/{thread}/stat").read_text(errors="replace")
            if thread != own and stat.rpartition(") ")[2].startswith("R"):
                return True
    return False
