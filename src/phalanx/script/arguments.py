"""What a script's file holds, looked at before ranks are started for it: a sentence a mistake."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.launch.exit_code import exit_code_of


def check_python(path: Path) -> None:
    """Refuse a script that is no Python, before ranks are started for it."""
    if path.suffix == ".pyc":
        return
    with warnings.catch_warnings():  # which come when it is run
        warnings.simplefilter("ignore")
        try:
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # the other of null bytes
            raise ConfigError(f"{path} is no Python: {error}") from None


def check_job(script: str, job: Callable[..., Any]) -> None:
    """Refuse a job's function that takes arguments, which nobody gives it."""
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
    """Refuse to end by a `sys.exit` of a job's own code, as if its work had been done."""
    try:
        yield
    except SystemExit as stop:
        said = stop.code if isinstance(stop.code, str) else f"exit code {exit_code_of(stop.code)}"
        raise ConfigError(
            f"{script} ended by sys.exit: {said}; expected a file that defines a function, which "
            "returns a phalanx.Trainer"
        ) from None
