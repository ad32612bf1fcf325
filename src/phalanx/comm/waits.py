"""Where a rank stands still until others have sent: told to whoever measures its time.

The collectives of this room say `with waiting(tensor):` around what blocks the thread. A clock that
asked by `told_to` then books that time as communication, also in the middle of a layer's forward or
backward; the check of calls looks whether what is waited for will ever come. A context variable
holds who asked: a thread has its own, so the collectives of another one, such as the writer of a
checkpoint, are told to nobody.
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
def told_to(wait: Wait) -> Generator[None]:
    """Enter `wait(tensor)` around each wait of this thread inside the block; others stay told."""
    token = _WAITS.set((*_WAITS.get(), wait))
    try:
        yield
    finally:
        _WAITS.reset(token)


@contextmanager
def waiting(tensor: Tensor | None = None) -> Generator[None]:
    """Be the context in which to block for other ranks, and for what they send."""
    with ExitStack() as stack:
        for wait in _WAITS.get():
            stack.enter_context(wait(tensor))
        yield
