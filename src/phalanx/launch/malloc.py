"""Have the C library keep freed memory for the next allocation.

glibc returns a large block to the system as soon as it is freed and asks for it again a moment
later: every page of it is then zeroed and mapped anew. A training step frees and takes the same
blocks again and again: that was 20,000 to 60,000 page faults and 3 to 5 % of a step's time
(benchmarks/data_parallel). The most that the process has in RAM stays the same.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Never shrink the heap and take large blocks from it too; nothing but with glibc.

    See mallopt(3). It holds for the whole process: ranks and parameter servers call it.
    """
    with suppress(OSError, AttributeError):  # no such library, or one without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)
