"""How a process uses its memory: garbage while it imports modules, and freed blocks.

Python looks for garbage in all objects when their number has grown by a quarter. Five such full
collections start while torch and the code for training are imported; they free next to nothing, and
take a sixth of the time (benchmarks/startup). Collections of new objects continue as usual.

By default glibc returns a large block to the kernel when it is freed; at the next allocation the
kernel maps and zeroes every page again. A training step frees and allocates the same blocks
repeatedly: this cost 20,000 to 60,000 page faults and 3 to 5 % of a step's time
(benchmarks/data_parallel). The peak resident memory of the process stays the same.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_USUAL = gc.get_threshold()
_IN_START_UP = (*_USUAL[:2], 1000)
"""The third threshold is the number of collections of the middle generation before a full one."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def collect_rarely() -> None:
    """Begin a start-up: postpone full collections until `collect_as_usual`."""
    gc.set_threshold(*_IN_START_UP)


def collect_as_usual() -> None:
    """End a start-up, in a process that computes or serves from now on."""
    if gc.get_threshold() == _IN_START_UP:  # else a script has chosen its own
        gc.set_threshold(*_USUAL)


def keep_freed_memory() -> None:
    """Never shrink the heap, and allocate large blocks from it too; no effect without glibc.

    See mallopt(3). The setting is per process: ranks and parameter servers call this.
    """
    with suppress(OSError, AttributeError):  # no such library, or one without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)
