"""Ranges of PyTorch's profiler: what runs in a trace has the name of an action, a phase, an axis.

Where no profiler runs, a range costs 0.3 microseconds; `record_function` alone would cost 7.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING = nullcontext()


def named(name: str) -> AbstractContextManager[Any]:
    """Name what runs inside the block in the trace of a profiler, if one runs."""
    # Private, of all profilers of torch; tests/comm/test_ranges.py pins it.
    is_on = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    return record_function(name) if is_on else _NOTHING
