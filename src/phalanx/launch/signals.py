"""Handle the signals that end the program, either at once or after the current step.

SIGINT is Ctrl-C; SIGTERM comes from Slurm, Kubernetes and `docker stop`; SIGHUP comes from a
terminal that is closed. A signal that is already ignored, as SIGHUP under nohup, stays ignored.
A SIGHUP is never the second signal, which ends a run at once: the kernel, the shell, and each
process that prints report one closed terminal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from phalanx.errors import Interrupted

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that request the program to end."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h: the signal that a process gets when its parent ends."""


@contextmanager
def raised() -> Generator[None]:
    """Raise Interrupted in the main thread for each ENDING signal that arrives inside."""

    def stop(signum: int, frame: FrameType | None) -> None:
        del frame
        raise Interrupted(signum)

    with handled(stop):
        yield


@contextmanager
def collected() -> Generator[list[int]]:
    """Yield a list that collects the ENDING signals that arrive inside, with no other effect."""
    signals: list[int] = []

    def collect(signum: int, frame: FrameType | None) -> None:
        del frame
        if signum != signal.SIGHUP or not signals:
            signals.append(signum)

    with handled(collect):
        yield signals


@contextmanager
def handled_in_thread(answer: Callable[[int], None]) -> Generator[None]:
    """Call `answer` in a thread for each signal inside, even while the main thread is in C++."""
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
        # Python writes to the wakeup descriptor only for signals that have a handler.
        with handled(lambda _signum, _frame: None):
            yield
    finally:
        if is_main:
            signal.set_wakeup_fd(before)
        theirs.close()
        thread.join(1.0)
        ours.close()


def ignore() -> None:
    """Ignore the ENDING signals from now on, or to the end of an enclosing block of this module."""
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        for signum in ENDING:
            signal.signal(signum, signal.SIG_IGN)


def request(ask: Callable[[int], None]) -> None:
    """Call `ask` for the first ENDING signal that arrives; a second signal ends the process.

    Signals that are ignored, or for which the program has set a handler, stay as they are.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    taken = [signum for signum in ENDING if signal.getsignal(signum) in defaults]

    def first(signum: int, frame: FrameType | None) -> None:
        del frame
        for each in taken:
            signal.signal(each, _do_nothing if each == signal.SIGHUP else signal.SIG_DFL)
        ask(signum)

    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        for signum in taken:
            signal.signal(signum, first)


def leave_to_parent() -> None:
    """Disregard the ENDING signals, which may reach all processes of a job: its parent decides.

    SIGTERM gets a handler that does nothing instead of being ignored, because child processes
    inherit an ignored signal, and the processes that a script starts must end by SIGTERM.
    """
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of libraries are restarted
    if not _registered:  # a rank inherits the registration from the forkserver
        _registered.append(True)
        # parent   block SIGTERM | fork | unblock: handler, does nothing
        # child                         | default handler, unblock: a SIGTERM sent meanwhile ends it
        # SIGTERM is blocked during a fork, so that one that arrives then also ends the child.
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_end_by_sigterm)


def end_with_server() -> None:
    """Have the kernel kill this process when the process that forked it ends; only on Linux.

    Without the forkserver, the parent can neither see whether this process lives nor kill it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_registered: list[bool] = []
_held = threading.local()


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    del signum, frame


def _hold() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _do_nothing:  # else a script has set a handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()


@contextmanager
def ignored_by_children() -> Generator[None]:
    """Make programs that are started inside ignore Ctrl-C, which their parent handles."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Call `handler` for each ENDING signal that arrives inside."""
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
