"""Mark blocking waits on other ranks, so that timers and the debugger can observe them.

Collectives of this package run `with waiting(tensor):` around code that blocks the thread. A timer
registered with `around_waits` then counts that time as communication, also in the middle of a
layer's forward or backward; the check of calls tests whether the awaited message can ever arrive.
Listeners are stored in a context variable, so each thread has its own: a listener does not observe
the collectives of another thread, such as the checkpoint writer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar

from torch import Tensor

Wait = Callable[[Tensor | None], AbstractContextManager[None]]
"""Awaited tensor, or None if unknown -> context that is entered for the time of the wait."""

_WAITS: ContextVar[tuple[Wait, ...]] = ContextVar("waits", default=())


@contextmanager
def around_waits(wait: Wait) -> Generator[None]:
    """Register listener `wait` for the waits of this thread inside the block."""
    token = _WAITS.set((*_WAITS.get(), wait))
    try:
        yield
    finally:
        _WAITS.reset(token)


@contextmanager
def waiting(tensor: Tensor | None = None) -> Generator[None]:
    """Enter every listener's context around a blocking wait for other ranks."""
    with ExitStack() as stack:
        for wait in _WAITS.get():
            stack.enter_context(wait(tensor))
        yield
