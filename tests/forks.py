"""Processes of the tests that are forked where they would import the libraries anew.

    pytest that deals the tests out      imports the libraries once
      worker of pytest-xdist             fork; imports the tests
        server of the worker's ranks     fork; forgets the tests
          rank                           fork

Each would take 5 to 15 s of processor to start as a program. A fork keeps of its parent the modules
alone: files, streams, filters of warnings, hooks of imports and of exit are those of a new process.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from execnet import gateway_io


def _fork(code: str, files: Sequence[int]) -> int:
    """Run a program in a fork of this process, which keeps these files and the standard ones.

    Return the process id.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a thread of pytest-xdist waits for messages
        process = os.fork()
    if process:
        return process
    status = 1
    try:
        _be_new(files)
        exec(code, vars(sys.modules["__main__"]))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(status)


def _be_new(files: Sequence[int]) -> None:
    # Objects of the parent may still write to their files, or close them: not to others' then.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (*files, nothing):
            os.dup2(nothing, number, inheritable=False)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False) for number, mode in enumerate("rww")
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv, sys.excepthook = ["-c"], sys.__excepthook__
    sys.meta_path[:] = [x for x in sys.meta_path if not isinstance(x, AssertionRewritingHook)]
    atexit._clear()
    atexit.register(util._exit_function)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind, append=True)
    main = vars(sys.modules["__main__"])  # the module stays: WARM knows it
    main.clear()
    main.update(vars(type(sys)("__main__")), __builtins__=__builtins__)


def start_server_of_ranks() -> None:
    """Start the server that ranks are forked from as a fork of this process."""
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", lambda _, args, files: _fork(args[-1], files))
        forkserver.ensure_running()


class _Worker(gateway_io.Popen2IOMaster):
    """A worker of pytest-xdist."""

    def __init__(self, args: Sequence[str], execmodel: Any) -> None:
        self.popen = program = _Program(args[-1])
        gateway_io.Popen2IO.__init__(self, program.stdin, program.stdout, execmodel=execmodel)


class _Program:
    """A fork with what pytest-xdist asks of a `Popen`."""

    def __init__(self, code: str) -> None:
        theirs, to_them = os.pipe()
        from_them, ours = os.pipe()
        streams = f"import os; os.dup2({theirs}, 0); os.dup2({ours}, 1)\n"
        streams += f"os.close({theirs}); os.close({ours})\n"
        self.pid = _fork(streams + code, (theirs, ours))
        os.close(theirs)
        os.close(ours)
        self.stdin, self.stdout = os.fdopen(to_them, "wb"), os.fdopen(from_them, "rb")

    def wait(self) -> int:
        status = os.waitpid(self.pid, 0)[1]
        self.stdin.close()
        self.stdout.close()
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def fork_workers() -> None:
    """Have pytest-xdist start its workers as forks of this process."""
    gateway_io.Popen2IOMaster = _Worker
