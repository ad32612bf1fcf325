"""Mark blocking waits on other ranks, so that timers and the debugger can observe them.

The collectives of this room say `with waiting(tensor):` around what blocks the thread. A clock that
listens by `around_waits` then books that time as communication, also in the middle of a layer's
forward or backward; the check of calls looks whether the awaited message will ever come. A context
variable holds the listeners: each thread has its own, so nobody observes the collectives of another
thread, such as the writer of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar

from torch import Tensor

Wait = Callable[[Tensor | None], AbstractContextManager[None]]
"""`with wait(tensor):` holds the time in which a rank waits, for that tensor if it is known."""

_WAITS: ContextVar[tuple[Wait, ...]] = ContextVar("waits", default=())


@contextmanager
def around_waits(wait: Wait) -> Generator[None]:
    """Enter `wait(tensor)` around each wait of this thread inside the block, beside others."""
    token = _WAITS.set((*_WAITS.get(), wait))
    try:
        yield
    finally:
        _WAITS.reset(token)


@contextmanager
def waiting(tensor: Tensor | None = None) -> Generator[None]:
    """Notify every listener around a blocking wait for other ranks."""
    with ExitStack() as stack:
        for wait in _WAITS.get():
            stack.enter_context(wait(tensor))
        yield
