"""Declare blocking waits on other ranks, so that heartbeats, timers and the debugger observe them.

Collectives of this package run `with waiting(tensor):` around code that blocks the thread, and code
that waits for other processes is in `declared` too. `current_wait` then returns the
wait of a thread, from which a heartbeat is made: a wait that polls runs through many frames, so
the stack does not show for how long it lasts.

A timer registered with `around_waits` counts the time of `waiting` as communication, also in the
middle of a layer's forward or backward; the check of calls tests whether the awaited message can
ever arrive. Listeners are stored in a context variable, so each thread has its own: a listener does
not observe the collectives of another thread, such as the checkpoint writer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor  # heartbeats start before torch is imported

    Listener = Callable[[Tensor | None, str], AbstractContextManager[None]]
    # Awaited tensor, or None if unknown; axis -> context that is entered for the time of the wait.


@dataclass(frozen=True)
class Wait:
    """A wait of a thread for other ranks.

    Attributes:
        is_limited: whether the job's timeout ends the wait, as in a collective.
        since_s: begin, in seconds of the monotonic clock.
    """

    is_limited: bool
    since_s: float


_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())

_WAITS: Final[dict[int, Wait]] = {}
"""Identifier of a thread -> its outermost wait."""


def current_wait(thread: int) -> Wait | None:
    """Return the outermost wait of a thread, or None if it does not wait."""
    return _WAITS.get(thread)


@contextmanager
def declared(*, is_limited: bool) -> Generator[None]:
    """Declare that this thread waits inside the block or function; an outer wait resumes after."""
    thread = threading.get_ident()
    if thread in _WAITS:
        yield
        return
    _WAITS[thread] = Wait(is_limited, time.monotonic())
    try:
        yield
    finally:
        del _WAITS[thread]


@contextmanager
def around_waits(listener: Listener) -> Generator[None]:
    """Register `listener` for the waits of this thread inside the block."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


@contextmanager
def waiting(tensor: Tensor | None = None, axis: str = "world") -> Generator[None]:
    """Enter every listener's context around a blocking wait for other ranks of a mesh axis."""
    with ExitStack() as stack:
        stack.enter_context(declared(is_limited=True))
        for listener in _LISTENERS.get():
            stack.enter_context(listener(tensor, axis))
        yield
