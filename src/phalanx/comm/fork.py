"""Fork a process, such as a DataLoader's worker, while the threads of gloo are asleep.

A thread of gloo that frees a tensor enters the interpreter, and holds the lock of its list of
threads for a moment, without the GIL. With Python 3.11, a process that is forked at that moment
waits for this lock for ever: CPython renews it only after it has taken it (`PyOS_AfterFork_Child`).
That was one in 200 to 500 loaders which fork their workers right after a collective.
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
"""How long a fork waits for the other threads; threads of OpenMP spin as long after their work."""

_POLL_S = 0.0005


@functools.cache
def fork_asleep() -> None:
    """Have each fork of this process wait until its other threads sleep, on Linux."""
    if sys.platform == "linux":
        os.register_at_fork(before=await_sleep)


def await_sleep(wait_s: float = WAIT_S) -> bool:
    """Wait until no other thread of this process computes, at most `wait_s`; return whether so.

    A thread that waits, for the GIL too, holds no lock of the interpreter.
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
            # After the name in parentheses, in which there may be others: proc(5).
            stat = Path(f"/proc/self/task/{thread}/stat").read_text(errors="replace")
            if thread != own and stat.rpartition(") ")[2].startswith("R"):
                return True
    return False
