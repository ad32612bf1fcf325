"""What a signal that asks the program to end means: to end at once, or after the step under way.

SIGINT is Ctrl-C; SIGTERM comes from Slurm, Kubernetes and `docker stop`; SIGHUP comes from a
terminal that is closed. A signal that is ignored already, as SIGHUP is under nohup, stays ignored.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from phalanx.errors import Interrupted

ENDING = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""The signals that ask the program to end."""


@contextmanager
def raised() -> Generator[None]:
    """Raise Interrupted in the main thread for each of the signals that comes inside."""

    def stop(signum: int, frame: FrameType | None) -> None:
        del frame
        raise Interrupted(signum)

    with _handled(stop):
        yield


@contextmanager
def collected() -> Generator[list[int]]:
    """Yield a list that gets each signal that comes inside, of which nothing else comes."""
    signals: list[int] = []
    with _handled(lambda signum, _: signals.append(signum)):
        yield signals


@contextmanager
def answered(answer: Callable[[int], None]) -> Generator[None]:
    """Call `answer` for each signal that comes inside, even while the main thread waits in C++."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def serve() -> None:
        while number := ours.recv(1):
            answer(number[0])

    thread = threading.Thread(target=serve, name="signals", daemon=True)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False) if is_main else -1
    thread.start()
    try:
        # Python writes to the descriptor only if there is a handler.
        with _handled(lambda _signum, _frame: None):
            yield
    finally:
        if is_main:
            signal.set_wakeup_fd(before)
        theirs.close()
        thread.join(1.0)
        ours.close()


def ignore() -> None:
    """Ignore the signals from now on, until the end of the block that handles them, if any."""
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for signum in ENDING:
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def ignored_by_children() -> Generator[None]:
    """Have a program that is started inside ignore Ctrl-C, which is for its parent to answer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        before = {signum: signal.getsignal(signum) for signum in ENDING}
        before = {signum: old for signum, old in before.items() if old is not signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
