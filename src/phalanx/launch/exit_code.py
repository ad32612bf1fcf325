"""Find the exit code that a SystemExit gives this process, before the process ends.

The exit code of a job of several ranks is chosen in failure.py.

A rank leaves by `os._exit` in an atexit function, to which Python does not pass the exit code. The
interpreter reads the attribute `code` of the SystemExit that ends the process, so a read without a
caller in Python means that the process ends with this code.
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
    """Record from now on the exit code of a SystemExit that ends this process, if it is a rank.

    `import phalanx` calls this, because `sys.exit(main())` looks up `sys.exit` before `main` runs.
    """
    if sys.exit is _exit or not any(name in os.environ for name in _NAMES):
        return
    # Python 3.11's own `sys.exit` creates the exception object only if a handler catches it.
    sys.exit = builtins.exit = builtins.quit = _exit
    # Attributes of C types cannot be assigned; tests/launch/test_exit_code.py pins this way.
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
    """Return the module-level frame of the main script, or None if it is not on the stack."""
    frame, main = sys._getframe(), sys.modules["__main__"]  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals is not vars(main):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame


def has_returned(frame: FrameType) -> bool:
    """Return whether a frame that has ended did so by returning, not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def exit_code_of(value: object) -> int:
    """Return the exit code that Python uses for the argument of `sys.exit`."""
    return value & 0xFF if isinstance(value, int) else int(value is not None)


def _exit(code: Any = None, /) -> NoReturn:
    """End the program by raising SystemExit, as Python's own `sys.exit` does."""
    raise SystemExit(code)


def _has_no_caller() -> bool:
    """Return whether the caller of this function was not called by Python code."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    return frame.f_back is None
