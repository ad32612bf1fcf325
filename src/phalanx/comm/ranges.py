"""Named ranges in PyTorch profiler traces, such as of an action, a phase, or a collective's axis.

Without a running profiler, a range costs 0.3 microseconds; `record_function` alone would cost 7.
While a profiler runs, listeners of this thread are called for each range, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd import profiler

Listener = Callable[[str, str], AbstractContextManager[None]]
"""Called with `name` and `of` of a range; its context is entered for the time of the range."""

_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("range listeners", default=())

_NOTHING = nullcontext()


def named(name: str, *tensors: Tensor, of: str = "") -> AbstractContextManager[Any]:
    """Label the block `name` in the profiler trace, if a profiler runs.

    The label also has `of`, a part of the model, and the size of the largest of `tensors`.
    """
    # Private, and set by all profilers of torch; tests/comm/test_ranges.py pins it.
    if not profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        return _NOTHING
    size = f"{max(each.nbytes for each in tensors) / 2**20:.3g} MiB" if tensors else ""
    recorded = profiler.record_function(" ".join(filter(None, (name, of, size))))
    if not (listeners := _LISTENERS.get()):
        return recorded
    stack = ExitStack()
    stack.enter_context(recorded)
    for listener in listeners:
        stack.enter_context(listener(name, of))
    return stack


@contextmanager
def around_ranges(listener: Listener) -> Generator[None]:
    """Register `listener` for the ranges of this thread inside the block."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)
