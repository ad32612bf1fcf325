"""Join the job that this process is a rank of, for as long as the process lasts.

`run_here` of launch/torchrun.py runs a function within a job; a script has no such function. So
this rank leaves the job when the script ends, by hooks that `attach` sets (`_Attached`):

    how the script ends          hook              the rank
    its last statement           atexit            waits for the other ranks, exits with code 0
    an uncaught error            sys.excepthook    reports the error as `run_here` does
    sys.exit, raise SystemExit   atexit            stops its heartbeats, and Python exits with the
                                                   code, which Python shows to no hook
"""

from __future__ import annotations

import atexit
import dis
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import util
from types import TracebackType
from typing import Any, Final

from phalanx.errors import ConfigError, Interrupted, PhalanxError, ScriptError, message_of
from phalanx.launch import schedulers, signals, torchrun
from phalanx.launch.agreement import check_same
from phalanx.launch.failure import READER_LEFT, is_reader_gone, reader_has_left, report
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.launch.rank_log import flush_streams, keep_printing

DEFAULT_TIMEOUT_S: Final = 600.0
"""Default of the longest wait for another rank in one collective, in seconds."""

ATTACH_CALLED: list[bool] = []
"""Non-empty once this process has called `attach`."""

_attached: list[_Attached] = []
_ending: dict[str, tuple[int, Callable[[str], None]]] = {}
"""Pending checks: name -> (id of the process that registered the check, check)."""
_readers: list[Callable[[BaseException], PhalanxError | None]] = []


def at_end(name: str, check: Callable[[str], None]) -> None:
    """Register a check that the next `check_end` runs; it replaces a check of the same name."""
    _ending[name] = os.getpid(), check


def no_ends() -> None:
    """Remove all pending checks."""
    _ending.clear()


def check_end(where: str = "the script ends") -> None:
    """Run every pending check once; a check raises if the script must not do what `where` says.

    `where` is a clause for the error message: the script ends, or it starts another run.
    """
    while _ending:
        process, check = _ending.pop(next(iter(_ending)))
        if process == os.getpid():  # a process that the script has forked is no rank
            check(where)


def attach(
    facts: Mapping[str, Any], *, device: str = "auto", timeout_s: float | None = None
) -> str:
    """Join the job that the environment describes, or create a job of this process alone.

    A process that has already joined, as under `phalanx run`, keeps its job.

    Args:
        facts: values that must be equal on all ranks, by name; JSON-serializable.
        device: "auto", "cpu" or "cuda".
        timeout_s: longest wait for another rank in one collective, in seconds; if None, the job's
            current timeout, or 600.

    Returns:
        "cpu" or "cuda": the device type of the job.

    Raises:
        ConfigError: the environment is incomplete, the host has too few GPUs, or ranks differ in
            `facts` (raised on rank 0).
        ScriptError: this process was spawned by the script and is importing the script again.
        TrainingError: another rank or host is lost, or does not answer.
    """
    import torch
    import torch.distributed as dist

    from phalanx.comm import join
    from phalanx.comm.together import gather_objects

    # Private: set while a spawned process imports the script of its parent.
    # tests/launch/test_attach.py pins it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ScriptError(
            "a process that this script started, such as a spawned DataLoader worker, runs the "
            "script again; put the statements that the script runs below `if __name__ == "
            '"__main__":`'
        )
    ATTACH_CALLED.append(True)
    if dist.is_initialized():
        if timeout_s is not None:
            join.set_timeout(timeout_s)
        if facts:
            check_same(gather_objects(dict(facts)))
        joined = "cuda" if dist.get_backend() == "nccl" else "cpu"
        if device not in ("auto", joined):
            raise ConfigError(
                f"init: device is {device}, but this process has joined a job on {joined}; start "
                f"the script by: phalanx run SCRIPT --device {device}"
            )
        return joined
    schedulers.adopt()
    limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if is_under_torchrun():
        job = torchrun.joined(lambda: facts, dict, device=device, threads=None, timeout_s=limit_s)
        device = job.__enter__().device
        PULSE.now("the script")
        _attached.append(_Attached(job))
        return device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    join.join(0, 1, store=dist.HashStore(), device=device, timeout_s=limit_s)
    PULSE.on_change = _heed_alone
    return device


def run_attached(
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    *,
    device: str,
    timeout_s: float,
) -> list[Any]:
    """Attach, run a function as a rank of the job, and return the results of all `num_ranks`.

    Raises:
        ConfigError: the job has another number of ranks.
        Exception: the error of the function, or of `error_to_raise` in place of it.
    """
    from phalanx.comm.together import gather_objects

    num_there = read_rank_env().num_ranks
    if num_there != num_ranks:
        raise ConfigError(
            f"this process is a rank of a job of {num_there}, as under torchrun, but "
            f"{num_ranks} ranks are requested; start a job of {num_ranks}, or unset RANK and "
            "WORLD_SIZE so that this process starts them"
        )
    attach({}, device=device, timeout_s=timeout_s)
    try:
        return gather_objects(function(*args))
    except Exception as error:
        raise error_to_raise(error) from error.__cause__


def report_in_one_message(
    mistake_of: Callable[[BaseException], PhalanxError | None] | None = None,
) -> None:
    """Report an uncaught PhalanxError or Interrupted in one message, without a traceback.

    This sets `sys.excepthook`, unless the program has replaced it, and calls `keep_printing`.

    Args:
        mistake_of: maps an error of another class to a PhalanxError that explains it, or None.
    """
    keep_printing()
    if mistake_of is not None:
        _readers[:] = [mistake_of]
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report_ours


def as_mistake(error: BaseException) -> BaseException:
    """Return the PhalanxError that explains an error of a script, or the error if none does."""
    return next((mistake for read in _readers if (mistake := read(error)) is not None), error)


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
    """Add a note to `error` with the innermost line of the script in its traceback.

    Args:
        error: an error that was raised.
        path: path of the script; if empty, path of the main module.
    """
    path = path or getattr(sys.modules["__main__"], "__file__", None) or ""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = f"at {path}:{trace.tb_lineno}"
        trace = trace.tb_next
    if line:
        error.add_note(line)


def leave_at_end() -> None:
    """Install exit hooks by which this process, when it ends, leaves a job that it joins later."""
    if not _attached:
        _attached.append(_Attached(nullcontext()))


def error_to_raise(error: Exception) -> BaseException:
    """Return the error that this rank raises in place of `error`, such as another rank's failure.

    Return `error` itself if this process has attached to no job under torchrun.
    """
    return _attached[-1].error_to_raise(error) if _attached else error


class _Attached:
    """Exit hooks of a joined job: leave it when the process ends, normally or with an error."""

    def __init__(self, job: AbstractContextManager[Any]) -> None:
        self._job = job
        self._process = os.getpid()
        # The module-level frame of the main script; None if it is not on the stack.
        frame, main = sys._getframe(), sys.modules["__main__"]  # pyright: ignore[reportPrivateUsage]
        while frame is not None and not (
            frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
        ):
            frame = frame.f_back
        self._main = frame
        self._judged: BaseException | None = None
        sys.excepthook = self._on_error
        atexit.register(self._on_end)

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Leave the job because of `error`; return the error that this rank raises instead."""
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
        if os.getpid() != self._process:
            sys.__excepthook__(kind, error, trace)
        else:
            error = as_mistake(error)
            if isinstance(error, PhalanxError):
                add_line(error)
            torchrun.leave_failed(self.error_to_raise(error))

    def _on_end(self) -> None:
        import torch.distributed as dist

        from phalanx.comm.together import barrier

        # A frame that has ended is still at its last instruction.
        main = self._main
        has_returned = main is None or dis.opname[main.f_code.co_code[main.f_lasti]].startswith(
            "RETURN"
        )
        if os.getpid() != self._process:  # a fork, to which neither job nor helpers belong
            if has_returned:
                flush_streams()
                os._exit(0)
            helpers: Any = util  # private; tests/launch/test_attach.py pins it
            atexit.unregister(helpers._exit_function)  # it would end them
        elif has_returned:
            try:
                check_end()
                if dist.is_initialized():
                    barrier()
            except Exception as error:
                torchrun.leave_failed(self.error_to_raise(error))
        self._job.__exit__(None, None, None)
        if has_returned or PULSE.handled_signal:
            torchrun.leave(_end_of_stop())


def _heed_alone() -> None:
    """Turn a signal into a request to stop, in a process that no launcher monitors."""

    def stop(signum: int) -> None:
        PULSE.stop_signal = signum
        name = signal.Signals(signum).name
        report(f"{name}: the script was asked to stop; a second signal ends it at once")

    def end() -> None:
        if not hasattr(sys, "last_value"):  # Python sets it for an uncaught error
            if code := _end_of_stop():
                torchrun.leave(code)

    if not PULSE.handles_stop:
        return
    PULSE.on_change = lambda: None
    signals.request(stop)
    atexit.register(end)


def _end_of_stop() -> int:
    """Return the exit code of a script that has ended; on rank 0, report a signal it obeyed."""
    if not PULSE.handled_signal:
        return 0
    if os.environ.get("RANK", "0") == "0":
        report(str(Interrupted(PULSE.handled_signal, PULSE.advice())))
    return 128 + PULSE.handled_signal
