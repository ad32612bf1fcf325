"""Where a rank stands still until others have sent: told to whoever measures its time.

The collectives of this room say `with waiting():` around what blocks the thread. A clock that asked
by `told_to` then books that time as communication, also in the middle of a layer's forward or
backward. A context variable holds who asked: a thread has its own, so the collectives of another
one, such as the writer of a checkpoint, are told to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Wait = Callable[[], AbstractContextManager[None]]
"""`with wait():` holds the time in which a rank waits."""

_WAIT: ContextVar[Wait | None] = ContextVar("wait", default=None)


@contextmanager
def told_to(wait: Wait) -> Generator[None]:
    """Enter `wait()` around each wait of this thread inside the block."""
    token = _WAIT.set(wait)
    try:
        yield
    finally:
        _WAIT.reset(token)


def waiting() -> AbstractContextManager[None]:
    """Return the context in which to block for other ranks."""
    wait = _WAIT.get()
    return nullcontext() if wait is None else wait()
