"""Know the exit code that a SystemExit gives this process, before the process ends.

The exit code of a job of several ranks is decided in failure.py.

A rank leaves by `os._exit` from a function that Python calls at its end, without a code.
Python takes the code from the exception's attribute `code`, so whoever reads that attribute without
a caller in Python is the end of the process.
"""

from __future__ import annotations

import builtins
import ctypes
import dis
import gc
import os
import sys
from types import FrameType
from typing import Any, Final, NoReturn

_NAMES: Final = ("RANK", "SLURM_PROCID")

_last: list[int] = []


def watch_if_rank() -> None:
    """Note from now on by which code a SystemExit ends this process, if it is a rank of a job.

    As early as `import phalanx`: `sys.exit(main())` looks `sys.exit` up before it calls `main`.
    """
    if sys.exit is _exit or not any(name in os.environ for name in _NAMES):
        return
    # Python 3.11 makes no exception of what its own `sys.exit` is given unless somebody catches it.
    sys.exit = builtins.exit = builtins.quit = _exit
    # The types of C cannot be assigned to; tests/launch/test_exit_code.py pins this way.
    (attributes,) = gc.get_referents(SystemExit.__dict__)
    code = attributes["code"]

    def read(stop: SystemExit) -> Any:
        value = code.__get__(stop)
        if _has_no_caller():
            _last[:] = [exit_code_of(value)]
        return value

    attributes["code"] = property(read, code.__set__, code.__delete__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def known() -> int | None:
    """Return the exit code of the SystemExit that ends this process, if one does."""
    return _last[-1] if _last else None


def main_frame() -> FrameType | None:
    """Return the frame of the script that calls this, if it was started as a program."""
    frame, main = sys._getframe(), sys.modules["__main__"]  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals is not vars(main):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame


def has_returned(frame: FrameType) -> bool:
    """Return whether a frame that has ended did so without an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def exit_code_of(value: object) -> int:
    """Return the exit code that Python makes of what `sys.exit` is given."""
    return value & 0xFF if isinstance(value, int) else int(value is not None)


def _exit(code: Any = None, /) -> NoReturn:
    """End the program by raising SystemExit, as the function of this name that Python has."""
    raise SystemExit(code)


def _has_no_caller() -> bool:
    """Return whether no function of Python called the one that asks."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    return frame.f_back is None
