"""What the methods of a run are given, looked at before anything is done: a sentence a mistake."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.checkpoint.foreign import brief
from phalanx.errors import ConfigError, ScriptError
from phalanx.launch.exit_code import exit_code_of


def check_python(path: Path) -> None:
    """Refuse a script that is no Python, before ranks are started for it.

    Raises:
        ConfigError: says why, and in which line.
    """
    if path.suffix == ".pyc":
        return
    with warnings.catch_warnings():  # which come when it is run
        warnings.simplefilter("ignore")
        try:
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # the other of null bytes
            raise ConfigError(f"{path} is no Python: {error}") from None


def check_job(script: str, job: Callable[..., Any]) -> None:
    """Refuse a job's function that takes arguments, which nobody gives it.

    Raises:
        ConfigError: says which arguments.
    """
    try:
        signature = inspect.signature(job)
    except ValueError:  # one of C need not have any
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"{script} takes arguments, {signature}, and is called without: {error}; expected a "
            "function that needs none"
        ) from None


@contextmanager
def not_ending(script: str) -> Generator[None]:
    """Refuse to end by a `sys.exit` of a job's own code, as if its work had been done.

    Raises:
        ConfigError: the code inside has called it.
    """
    try:
        yield
    except SystemExit as stop:
        said = stop.code if isinstance(stop.code, str) else f"exit code {exit_code_of(stop.code)}"
        raise ConfigError(
            f"{script} ended by sys.exit: {said}; expected a file that defines a function, which "
            "returns a phalanx.Trainer"
        ) from None


def folder_of(call: str, folder: Any) -> Path:
    """Return a folder that a script names.

    Raises:
        ScriptError: it is no path, or a file.
    """
    if not isinstance(folder, str | Path) or not str(folder):
        raise ScriptError(f"{call}: the folder is {brief(folder)}; expected a path")
    path = Path(folder)
    if path.is_file():
        raise ScriptError(f"{call}: {path} is a file; expected the folder of a run")
    return path


def check_keep(keep: Any) -> None:
    """Refuse a number of checkpoints to keep that would keep none.

    Raises:
        ScriptError: says what is expected.
    """
    is_count = isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1
    if keep is not None and not is_count:
        raise ScriptError(
            f"save: keep is {brief(keep)}; expected how many of the latest checkpoints stay, at "
            "least 1, or None for all"
        )


def check_clip(max_norm: Any, p: Any) -> None:
    """Refuse a norm that would turn gradients round, or leave them.

    Raises:
        ScriptError: says what is expected.
    """
    for name, value in (("max_norm", max_norm), ("p", p)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or math.isnan(value) or value <= 0:
            raise ScriptError(f"clip: {name} is {brief(value)}; expected a number above 0")
