"""Join the job that this process is a rank of, for as long as the process lasts.

`run_here` of launch/torchrun.py runs a function within a job; a script has none to give. So the
script's own end is the end of its part of the job: its error is reported as by `run_here`, and a
normal end waits for the other ranks.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final

from phalanx.errors import ConfigError, Interrupted, PhalanxError, ScriptError, message_of
from phalanx.launch import exit_code, signals, slurm, torchrun
from phalanx.launch.agreement import check_same
from phalanx.launch.failure import READER_LEFT, is_reader_gone, reader_has_left, report
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.launch.rank_log import flush_streams

DEFAULT_TIMEOUT_S: Final = 600.0
"""Longest wait for another rank in one collective where nothing is said, in seconds."""

ASKED: list[bool] = []
"""Has something once this process has been asked to join."""

_attached: list[_Attached] = []
_ending: dict[str, tuple[int, Callable[[str], None]]] = {}
"""Checks that are not made yet, each with the process that asked for it, by name."""
_readers: list[Callable[[BaseException], PhalanxError | None]] = []


def at_end(name: str, check: Callable[[str], None]) -> None:
    """Have the next `check_end` make a check, in place of the one of that name."""
    _ending[name] = os.getpid(), check


def no_ends() -> None:
    """Forget all checks."""
    _ending.clear()


def check_end(where: str = "the script ends") -> None:
    """Make the checks of all that has been done so far, `where` a sentence; each is made once.

    A check may refuse that the script ends, or begins something else.
    """
    while _ending:
        process, check = _ending.pop(next(iter(_ending)))
        if process == os.getpid():  # a fork that the script has made speaks for no rank
            check(where)


def attach(
    facts: Mapping[str, Any], *, device: str = "auto", timeout_s: float | None = None
) -> str:
    """Join the job of this process's environment, or make one of this process alone.

    A process that has joined already, as under `phalanx run`, stays as it is.

    Args:
        facts: what all ranks must agree on, by name; plain values for JSON.
        device: "auto", "cpu" or "cuda".
        timeout_s: longest wait for another rank in one collective, in seconds; if None, what the
            job was joined with, or 600.

    Returns:
        "cpu" or "cuda": what the job computes on.

    Raises:
        ConfigError: the environment is incomplete, the host has too few GPUs, or ranks differ in
            `facts` (raised on rank 0).
        ScriptError: this is a process that the script has started, which runs the script again.
        TrainingError: another rank or host is lost, or does not answer.
    """
    import torch
    import torch.distributed as dist

    from phalanx.comm import join

    _refuse_helper()
    ASKED.append(True)
    if dist.is_initialized():
        return _as_joined(facts, device, timeout_s)
    slurm.adopt()
    limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if is_under_torchrun():
        return _attach_to_job(facts, device, limit_s)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    join.join(0, 1, store=dist.HashStore(), device=device, timeout_s=limit_s)
    PULSE.on_change = _heed_alone
    return device


def report_in_one_message(
    mistake_of: Callable[[BaseException], PhalanxError | None] | None = None,
) -> None:
    """Have an error of ours that nobody catches end this process as it ends a job: by one message.

    That is a PhalanxError, or an Interrupted. A program that has an excepthook of its own keeps it.

    Args:
        mistake_of: an error of another kind -> the PhalanxError that says more, if there is one.
    """
    if mistake_of is not None:
        _readers[:] = [mistake_of]
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report_ours


def as_mistake(error: BaseException) -> BaseException:
    """Return the PhalanxError that says more than an error that a script ends by, or the error."""
    return next((found for read in _readers if (found := read(error)) is not None), error)


def _report_ours(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    error = as_mistake(error)
    if not isinstance(error, (PhalanxError, Interrupted)):
        sys.__excepthook__(kind, error, trace)
        return
    if isinstance(error, PhalanxError):
        add_line(error)
    if is_reader_gone(error) and reader_has_left():
        raise SystemExit(READER_LEFT)
    report(message_of(error))
    raise SystemExit(error.exit_code)


def add_line(error: PhalanxError, path: str = "") -> None:
    """Add to a message the innermost line of the script that it passed through.

    Args:
        error: what has been raised.
        path: of the script; the program's if empty.
    """
    path = path or getattr(sys.modules["__main__"], "__file__", None) or ""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = f"at {path}:{trace.tb_lineno}"
        trace = trace.tb_next
    if found:
        error.add_note(found)


def leave_at_end() -> None:
    """Have this process's own end, or its error, be the end of its part of a job to come."""
    if not _attached:
        _attached.append(_Attached(nullcontext()))


def judged(error: Exception) -> BaseException:
    """Return what this rank is to raise in place of an error: one of another rank may say more.

    Of a process that has attached to no job under torchrun it is the error itself.
    """
    return _attached[-1].judged(error) if _attached else error


def _refuse_helper() -> None:
    # Private: set while a process that was spawned imports the script of its parent.
    # tests/launch/test_exit_code.py pins it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ScriptError(
            "a process that this script has started, such as a DataLoader's worker that is "
            "spawned, runs the script again; put what the script runs below `if __name__ == "
            '"__main__":`'
        )


def _as_joined(facts: Mapping[str, Any], device: str, timeout_s: float | None) -> str:
    """Return what the job of this process computes on; refuse to ask it for something else."""
    import torch.distributed as dist

    from phalanx.comm import join
    from phalanx.comm.together import gather_objects

    if timeout_s is not None:
        join.set_timeout(timeout_s)

    if facts:
        check_same(gather_objects(dict(facts)))
    joined = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if device not in ("auto", joined):
        raise ConfigError(
            f"init: device is {device}, but this process has joined a job on {joined}; start it "
            f"by: phalanx run SCRIPT --device {device}"
        )
    return joined


def _attach_to_job(facts: Mapping[str, Any], device: str, timeout_s: float) -> str:
    job = torchrun.joined(lambda: facts, dict, device=device, threads=None, timeout_s=timeout_s)
    device = job.__enter__().device
    PULSE.now("the script")
    _attached.append(_Attached(job))
    return device


class _Attached:
    """How this process leaves the job that it has joined: at its own end, or by an error."""

    def __init__(self, job: AbstractContextManager[Any]) -> None:
        self._job = job
        self._process = os.getpid()
        self._main = exit_code.main_frame()
        self._has_failed = False
        self._judged: BaseException | None = None
        sys.excepthook = self._on_error
        atexit.register(self._on_end)

    def judged(self, error: BaseException) -> BaseException:
        """Return what this rank is to raise in place of an error, and leave the job."""
        if error is self._judged:
            return error
        self._judged = error
        try:
            self._job.__exit__(type(error), error, error.__traceback__)
        except BaseException as judged:
            self._judged = judged
            return judged
        return error

    def _on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._is_fork():
            self._has_failed = True
            sys.__excepthook__(kind, error, trace)
        else:
            error = as_mistake(error)
            if isinstance(error, PhalanxError):
                add_line(error)
            torchrun.leave_failed(self.judged(error))

    def _on_end(self) -> None:
        import torch.distributed as dist

        from phalanx.comm.together import barrier

        code = exit_code.known()
        if self._is_fork():
            flush_streams()
            os._exit(int(self._has_failed) or code or 0)  # helpers and job are the rank's
        if code is None and self._main is not None and not exit_code.has_returned(self._main):
            return  # by a sys.exit that was looked up before phalanx was: Python knows its code
        if not code:
            try:
                check_end()
                if dist.is_initialized():
                    barrier()
            except Exception as error:
                torchrun.leave_failed(self.judged(error))
            self._job.__exit__(None, None, None)
            code = _end_of_stop()
        torchrun.leave(code)

    def _is_fork(self) -> bool:
        """Return whether this is a fork that the script has made, which speaks for no rank."""
        return os.getpid() != self._process


def _heed_alone() -> None:
    """Have a signal ask this process to stop, which no launcher watches."""

    def end() -> None:
        if not hasattr(sys, "last_value"):  # where Python notes an error that nobody has caught
            if code := _end_of_stop():
                torchrun.leave(code)

    if not PULSE.heeds_stop:
        return
    PULSE.on_change = lambda: None
    signals.request(_stop)
    atexit.register(end)


def _stop(signum: int) -> None:
    PULSE.stop_signal = signum
    name = signal.Signals(signum).name
    report(f"{name}: the script is asked to stop; a second signal ends it at once")


def _end_of_stop() -> int:
    """Return the exit code of a script that has come to its end, and say that a signal ended it."""
    if not PULSE.obeyed:
        return 0
    if os.environ.get("RANK", "0") == "0":
        report(str(Interrupted(PULSE.obeyed, PULSE.advice())))
    return 128 + PULSE.obeyed
