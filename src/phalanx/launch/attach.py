"""Join the job that this process is a rank of, for as long as the process lasts.

`run_here` of launch/torchrun.py runs a function within a job; a script has none to give. So the
script's own end is the end of its part of the job: what it raises is told as by `run_here`, and a
normal end waits for the other ranks.
"""

from __future__ import annotations

import atexit
import builtins
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from phalanx.errors import ConfigError
from phalanx.launch import slurm, torchrun
from phalanx.launch.pulse import PULSE
from phalanx.launch.rank_env import is_under_torchrun

ASKED: list[bool] = []
"""Has something once this process has been asked to join."""


def attach(facts: Mapping[str, Any], *, device: str = "auto", timeout_s: float = 600.0) -> str:
    """Join the job of this process's environment, or make one of this process alone.

    A process that has joined already, as under `phalanx run`, stays as it is.

    Args:
        facts: what all ranks must agree on, by name; plain values for JSON.
        device: "auto", "cpu" or "cuda".
        timeout_s: longest wait for another rank in one collective, in seconds.

    Returns:
        "cpu" or "cuda": what the job computes on.

    Raises:
        ConfigError: the environment is incomplete, the host has too few GPUs, or ranks differ in
            `facts` (raised on rank 0).
        TrainingError: another rank or host is lost, or does not answer.
    """
    import torch
    import torch.distributed as dist

    from phalanx.comm import join

    ASKED.append(True)
    if dist.is_initialized():
        return _as_joined(facts, device)
    slurm.adopt()
    if is_under_torchrun():
        return _attach_to_job(facts, device, timeout_s)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    join.join(0, 1, store=dist.HashStore(), device=device, timeout_s=timeout_s)
    return device


def _as_joined(facts: Mapping[str, Any], device: str) -> str:
    """Return what the job of this process computes on; refuse to ask it for something else."""
    import torch.distributed as dist

    from phalanx.comm.together import gather_objects

    if facts:
        torchrun.check_same(gather_objects(dict(facts)))
    joined = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if device not in ("auto", joined):
        raise ConfigError(
            f"init: device is {device}, but this process has joined a job on {joined}; start it "
            f"by: phalanx run SCRIPT --device {device}"
        )
    return joined


def _attach_to_job(facts: Mapping[str, Any], device: str, timeout_s: float) -> str:
    from phalanx.comm.together import barrier

    job = torchrun.joined(lambda: facts, dict, device=device, threads=None, timeout_s=timeout_s)
    device = job.__enter__().device
    PULSE.doing("running").__enter__()
    codes: list[int] = []

    def on_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            job.__exit__(kind, error, trace)
        except BaseException as judged:
            torchrun.leave_failed(judged)
        torchrun.leave_failed(error)

    def on_end() -> None:
        if not any(codes):
            try:
                barrier()
            except Exception as error:
                on_error(type(error), error, error.__traceback__)
            job.__exit__(None, None, None)
        torchrun.leave(codes[-1] if codes else 0)

    leave = sys.exit

    def exit_with(code: Any = None) -> None:
        # What is called at the end of a process is not told its exit code. That of a bare
        # `raise SystemExit(code)` stays unknown, and 0 is given (docs/your_model.md).
        codes.append(code if isinstance(code, int) else int(code is not None))
        leave(code)

    sys.excepthook = on_error
    sys.exit = builtins.exit = builtins.quit = exit_with  # pyright: ignore[reportAttributeAccessIssue]
    atexit.register(on_end)
    return device
