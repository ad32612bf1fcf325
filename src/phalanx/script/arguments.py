"""Checks of a script file and its job function, made before ranks are started for it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from phalanx.errors import ConfigError, ScriptError
from phalanx.launch.failure import exit_code_of

_OF_EXAMPLES: Final = ("sklearn", "transformers")
"""Modules that the extra `examples` installs."""


def check_python(path: Path) -> None:
    """Check that a script compiles as Python, before ranks are started for it."""
    if path.suffix == ".pyc":
        return
    with warnings.catch_warnings():  # they are shown when the script runs
        warnings.simplefilter("ignore")
        try:
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # ValueError: the source has null bytes
            raise ConfigError(f"{path} is not valid Python: {error}") from None


def check_job(script: str, job: Callable[..., Any]) -> None:
    """Refuse a job function with required arguments, because it is called without arguments."""
    try:
        signature = inspect.signature(job)
    except ValueError:  # a function written in C may have no signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"{script} requires arguments, {signature}, but is called without any: {error}; "
            "expected a function without required arguments"
        ) from None


@contextmanager
def finding_modules(script: str) -> Generator[None]:
    """Convert the ModuleNotFoundError of a package that is not installed into a ScriptError."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if not name or find_spec(name) is not None:
            raise
        extra = " (for the examples: pip install 'phalanx-train[examples]')"
        raise ScriptError(
            f"{script} needs the module '{name}', which this Python, {sys.executable}, does not "
            f"find; install the package that has it{extra if name in _OF_EXAMPLES else ''}"
        ).with_traceback(error.__traceback__) from None


@contextmanager
def not_ending(script: str) -> Generator[None]:
    """Convert a `sys.exit` of the job's code into a ConfigError, even with exit code 0."""
    try:
        yield
    except SystemExit as stop:
        said = stop.code if isinstance(stop.code, str) else f"exit code {exit_code_of(stop.code)}"
        raise ConfigError(
            f"{script} ended by sys.exit: {said}; expected a file that defines a function, which "
            "returns a phalanx.Trainer"
        ) from None
