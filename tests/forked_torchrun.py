"""torchrun and scripts without a start of Python: they are forked from the tests' server.

The environment of a rank, whom the agent ends by which signal, and what it prints are torchrun's
own. A forked rank keeps the agent's open files, which a program would not, and multiprocessing
prints what the rank does not catch.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from phalanx.launch.signals import ENDING

LIMIT_S = 280


def run_two(*words: str) -> subprocess.CompletedProcess[str]:
    """Do what `torchrun --nproc-per-node=2` does with a script, or `-m` and a module."""
    return _run(_run_agent, ["--nproc-per-node=2", *words])


def run_script(*words: str) -> subprocess.CompletedProcess[str]:
    """Do what `python` does with a script and its words."""
    return _run(_run_alone, [*words])


def _run(
    target: Callable[[list[str], Path, Path], None], args: list[str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        process = multiprocessing.get_context("forkserver").Process(
            target=target, args=(args, out, err)
        )
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(args, LIMIT_S, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(args, process.exitcode, out.read_text(), err.read_text())


def _run_agent(words: list[str], out: Path, err: Path) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    _write_to(out, err)
    SubprocessHandler._popen = lambda _, args, env: _Forked(args, env)
    run.main(words)


def _run_alone(words: list[str], out: Path, err: Path) -> None:
    _write_to(out, err)
    _run_main(words)


def _write_to(out: Path, err: Path) -> None:
    for standard, file in enumerate((out, err), start=1):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), standard)


class _Forked:
    """A program of Python in a fork of this process, with what torchrun asks of a `Popen`."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str]) -> None:
        context = multiprocessing.get_context("fork")
        self._process: BaseProcess = context.Process(target=_run_program, args=(args, env))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._process.exitcode


def _run_program(args: tuple[str, ...], env: dict[str, str]) -> None:
    os.setsid()
    for signum in ENDING:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    python, unbuffered, *words = args
    assert (python, unbuffered) == (sys.executable, "-u"), args
    _run_main(words)


def _run_main(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
