"""What a signal that asks the program to end means: to end at once, or after the step under way.

SIGINT is Ctrl-C; SIGTERM comes from Slurm, Kubernetes and `docker stop`; SIGHUP comes from a
terminal that is closed. A signal that is ignored already, as SIGHUP is under nohup, stays ignored.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from phalanx.errors import Interrupted

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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


def request(ask: Callable[[int], None]) -> None:
    """Call `ask` for the first of the signals that comes; a second one ends the process.

    Those that are ignored, or for which the program has a handler of its own, stay as they are.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    taken = [signum for signum in ENDING if signal.getsignal(signum) in defaults]

    def first(signum: int, frame: FrameType | None) -> None:
        del frame
        for each in taken:
            signal.signal(each, signal.SIG_DFL)
        ask(signum)

    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for signum in taken:
            signal.signal(signum, first)


def leave_to_parent() -> None:
    """Pay no heed to the signals: they may come to all processes of a job, and its parent decides.

    SIGTERM gets a handler that does nothing, since an ignored signal stays so in the programs and
    forks that a script starts, and they are ended by SIGTERM.
    """
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.siginterrupt(signal.SIGTERM, False)  # no call of a library is broken off
    # Held back meanwhile, a signal that comes at once ends the fork too.
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_end_by_sigterm)


_held = threading.local()


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    del signum, frame


def _hold() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _do_nothing:  # and not a script's own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()


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
