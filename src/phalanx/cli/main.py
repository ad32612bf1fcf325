"""The phalanx command: find the verb, run it, and report an error in one message.

The module of a verb is imported when the verb runs, so that `phalanx --help` needs no torch.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Final

from phalanx.errors import (
    ConfigError,
    Interrupted,
    PhalanxError,
    message_of,
    nearest,
    shortened,
    system_limit_advice,
)
from phalanx.launch import signals
from phalanx.launch.failure import (
    READER_LEFT,
    exit_code_of,
    is_reader_gone,
    reader_has_left,
)
from phalanx.launch.local import server_stopped
from phalanx.launch.rank_log import LOST_OUTPUT, keep_printing

VERBS: Final[Mapping[str, str]] = {
    "train": "train a decoder on text over one or many processes",
    "run": "run a training script of your own, which calls phalanx.init, on many processes",
    "launch": "run train, run, verify or bench scaling on several hosts, by ssh",
    "server": "run one parameter-server role of a multi-host job",
    "verify": "prove that a strategy computes what one process computes",
    "bench": "measure this machine: matmul ceiling, MFU, scaling, the time of each layer",
    "report": "say where time, bytes and memory of a run went, beside the plan; compare runs",
    "plan": "find the fastest strategies that fit a model on a cluster, by pricing them",
    "show": "run a method on ranks, step by step; or show devices and clusters of the catalogue",
    "doctor": "check the installation; with --peer or --hosts, hosts and the links between them",
    "convert": "turn Hugging Face weights into a checkpoint, or back",
    "generate": "continue prompts with a trained model, on the screen",
    "serve": "serve a trained model over HTTP with an OpenAI-compatible API",
}
"""Verb -> description; the module phalanx.cli.<verb> has `run(argv) -> exit code`."""

MOVED: Final[Mapping[str, str]] = {
    "predict": "benchmarks/planner/predict.py of the source tree predicts published runs",
}
"""Former verb -> where its work is done now."""

LONGEST_LINE: Final = 800
"""Longest line of a usage error, in characters; longer ones, with long values, are shortened."""

FILE_ERRORS: Final[Mapping[int, str]] = {
    errno.ENOSPC: "no space left on the device; free some space, or choose a folder on another",
    errno.EDQUOT: "the disk quota is used up; free some space, or choose another folder",
    errno.EACCES: "permission denied; choose another path, or change its permissions",
    errno.EPERM: "permission denied; choose another path, or change its permissions",
    errno.EROFS: "the file system is read-only; choose a folder that you may write to",
    errno.EEXIST: "there is a file of this name; choose another folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another path",
    errno.EISDIR: "is a folder; a file was expected",
    errno.ELOOP: "its symbolic links form a loop; choose another path",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}
"""Error number -> advice on a file error that the user can fix; other numbers, except system
limits, are bugs."""


def main(argv: Sequence[str] | None = None, run: Callable[[list[str]], int] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the words after `phalanx`; the arguments of this process if None.
        run: function to call instead of a verb, for a script that reports errors like a verb.

    Returns:
        The exit code: 0 success, 1 the work failed, 2 the request was wrong, 130 interrupted,
        129 or 143 ended by SIGHUP or SIGTERM, 141 the reader of the output closed the pipe.
    """
    _open_standard_streams()
    keep_printing()
    words = list(sys.argv[1:] if argv is None else argv)
    if not os.environ.get("COLUMNS", "").strip("0"):  # an empty or zero width is ignored
        os.environ.pop("COLUMNS", None)
    # Mute warnings with forty lines of C++ frames each; torch also raises the relevant errors.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        with signals.raised():
            return _run(words, run or _dispatch)
    finally:
        if argv is None:  # the process exits: a signal has nothing left to interrupt
            signals.ignore()
            gc.freeze()  # else Python visits all objects of torch once more, in up to a second


def _run(words: list[str], run: Callable[[list[str]], int]) -> int:
    """Run one verb; print an error as one message, and return the exit code."""
    try:
        exit_code = _exit_code(words, run)
        sys.stdout.flush()
        if exit_code == 0 and (reason := LOST_OUTPUT.get(1)):
            return _fail(
                f"standard output: {reason}; the work is done, but not all is shown", 2, words
            )
        return exit_code
    except (PhalanxError, OSError, MemoryError) as error:
        if is_reader_gone(error) and reader_has_left():
            return READER_LEFT
        if isinstance(error, PhalanxError):
            return _fail(message_of(error), error.exit_code, words)
        number, name = (error.errno, error.filename) if isinstance(error, OSError) else (0, None)
        if not (advice := FILE_ERRORS.get(number or 0) or system_limit_advice(error)):
            raise
        where = f"{name}: " if name else ""
        return _fail(f"{where}{advice}", 2, words)
    except KeyboardInterrupt as error:
        how = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        return _fail(str(how), how.exit_code, words)
    except (RuntimeError, ImportError) as error:
        if not (advice := system_limit_advice(error)):
            raise
        return _fail(advice, 2, words)
    except ValueError as error:  # raised by the import of torch
        if "TORCH_LOGS" not in os.environ or "log settings" not in str(error):
            raise
        said = f"the environment's TORCH_LOGS is '{os.environ['TORCH_LOGS']}', which torch cannot"
        return _fail(f"{said} read; unset it, or see TORCH_LOGS=help", 2, words)


def _exit_code(words: list[str], run: Callable[[list[str]], int]) -> int:
    """Return the exit code of `run`, which may raise SystemExit."""
    try:
        with server_stopped():
            return run(words)
    except SystemExit as stop:  # after --help, or rich met a closed pipe
        if is_reader_gone(stop):
            return READER_LEFT
        return exit_code_of(stop.code)


def _dispatch(words: list[str]) -> int:
    """Run the verb that the first word names."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    elif words[1:] == ["help"]:
        words = [words[0], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    verb, *rest = words
    if verb == "--version":
        import phalanx

        print(f"phalanx {phalanx.__version__}")
        return 0
    if verb in MOVED:
        raise ConfigError(f"'{verb}' is no verb any more; {MOVED[verb]}")
    if verb not in VERBS:
        raise ConfigError(
            f"{verb!r} is not a verb{nearest(verb, VERBS)}; the verbs are {', '.join(VERBS)}"
        )
    return import_module(f"phalanx.cli.{verb}").run(rest)


def _usage() -> str:
    """Return the text of `phalanx --help`."""
    lines = [
        "usage: phalanx VERB [OPTIONS]",
        "",
        "Train a PyTorch model on many devices by any mix of the known ways to split the work,",
        "and prove that it computes what one device computes.",
        "",
        *(f"  {verb:<9} {text}" for verb, text in VERBS.items()),
        "",
        "phalanx help VERB lists a verb's options; --json makes the last line of its output one",
        "JSON document; --version prints the version.",
        "",
        "  phalanx train                                the demo: a small decoder on real text",
        "  phalanx train --strategy dp2 --data notes/   your own text over two processes",
        "  phalanx train --script my.py:job             your own model: train --script --help",
        '  phalanx verify "dp2"                         every gradient against one process',
    ]
    return "\n".join(lines)


def _open_standard_streams() -> None:
    """Open os.devnull as each standard stream that is closed, as by `>&-` or cron.

    Otherwise the next file opened gets the descriptor, and this process and its ranks print to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open returns the lowest free descriptor: `number`
            os.set_inheritable(number, True)  # for the forkserver of the ranks
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _fail(message: str, exit_code: int, words: Sequence[str]) -> int:
    """Print one message on standard error, and with --json one document on standard output."""
    signals.ignore()  # a signal would only cut the message short
    from phalanx.report.terminal import Terminal

    for word in words:  # a name from the command line stays in one line
        for name in (word, *re.split("[=:]", word)):
            if "\n" in name:
                message = message.replace(name, name.replace("\n", "\\n"))
    if exit_code == PhalanxError.exit_code:
        lines = message.split("\n")
        message = "\n".join(shortened(line, LONGEST_LINE, " ") for line in lines)
    Terminal(is_error=True).fail("phalanx", message)
    if {"--json", "--json=true"}.intersection(words):
        print(json.dumps({"error": message, "exit_code": exit_code}), flush=True)
    return exit_code
