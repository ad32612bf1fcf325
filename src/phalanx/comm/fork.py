"""Delay each fork, such as of a DataLoader worker, until gloo's threads are asleep.

A gloo thread that frees a tensor enters the interpreter, and briefly holds the lock of the
interpreter's thread list without the GIL. With Python 3.11, a process forked at that moment
deadlocks: the child acquires this lock before it reinitializes it (`PyOS_AfterFork_Child`). This
happened to one in 200 to 500 DataLoaders that forked their workers right after a collective.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.errors import ScriptError

WAIT_S = 0.2
"""Most time a fork waits for other threads, in seconds; OpenMP threads spin as long after work."""

_POLL_S = 0.0005

_inherited: Any = None
"""In a fork of a rank, the rank's group: peers would take the fork's messages for the rank's."""


def _inherit() -> None:
    global _inherited
    _inherited = dist.group.WORLD if dist.is_initialized() else None
    # A fork has none of gloo's threads, for which the destructor of a group would wait forever.
    internals: Any = dist.distributed_c10d
    for group in internals._world.pg_map if _inherited is not None else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_inherit)


def refuse_in_fork(op: str) -> None:
    """Raise ScriptError if this process is a fork of a rank, and has not joined a job itself."""
    if _inherited is not None and _inherited is dist.group.WORLD:
        raise ScriptError(
            f"{op}: this process is a fork of a rank, such as a worker of a DataLoader, and not a "
            "rank; run communication with other ranks in the script's own process"
        )


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
