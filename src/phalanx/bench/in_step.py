"""Slowdown of operators and collectives inside a training step on CPUs, compared with alone.

In a step, tensors are not in caches, ranks share cores, and collectives copy the buffers that they
send and receive. Steps of a small decoder measure each cost for the planner's calibration file.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from phalanx.comm.comm import Ranks
from phalanx.comm.together import barrier
from phalanx.launch.local import run_ranks
from phalanx.measure.core import small_step, step_s
from phalanx.planner.calibration_file import Calibration, Compute
from phalanx.planner.kept_rates import small_step_s
from phalanx.planner.machine import Core

_RANKS_PER_CORE: Final = 4
"""Ranks per core in the measurement of cores that several ranks share."""

_STEPS: Final = 9
"""Repeats in the timing of a collective inside a step."""


def core_in_step(machine: Calibration, compute: Compute, core: Core) -> Core:
    """Return `core` with measured slowdowns: `in_step`, and `crowd` for ranks that share a core.

    A small decoder runs on one rank per core, and then on `_RANKS_PER_CORE` ranks per core.
    """
    one_s, crowd_s = (
        statistics.median(run_ranks(step_s, num * machine.num_here, threads=1))
        for num in (1, _RANKS_PER_CORE)
    )
    alone = dataclasses.replace(core, in_step=1.0)
    measured = dataclasses.replace(machine, compute=dataclasses.replace(compute, core=alone))
    in_step = one_s / small_step_s(measured, machine.num_here)
    crowd = math.log(crowd_s / one_s / _RANKS_PER_CORE) / math.log(_RANKS_PER_CORE)
    return dataclasses.replace(core, in_step=in_step, crowd=max(0.0, crowd))


def time_in_step(num_here: int) -> float:
    """Return the time of a small model's gradient all-reduce in a step / alone; at least 1."""
    num_ranks = torch.distributed.get_world_size()
    comm = Ranks({"dp": num_ranks // num_here, "tp": num_here}, "cpu")
    axis = "tp" if num_here > 1 else "dp"
    model, compute = small_step()
    compute()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    alone = torch.cat([g.flatten() for g in gradients])

    def call() -> None:
        comm.all_reduce(alone, axis, "max")  # a sum would grow with each call

    def whole() -> None:
        compute()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        comm.all_reduce(flat, axis)
        for gradient, part in zip(
            gradients, flat.split([*map(Tensor.numel, gradients)]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    # A collective in a step also waits for caches and cores that compute has just used. The ratio
    # of what it adds to a step, and what it takes alone, is what the planner multiplies by.
    alone_s, compute_s, whole_s = (median_s(each, _STEPS) for each in (call, compute, whole))
    return max(1.0, (whole_s - compute_s) / alone_s)


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of `call` on all ranks at once, after one warm-up call."""
    times_s: list[float] = []
    for _ in range(1 + repeats):
        barrier()
        _finish()
        begun_s = time.perf_counter()
        call()
        _finish()
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s[1:])


def _finish() -> None:
    if torch.cuda.is_available() and torch.distributed.get_backend() == "nccl":
        torch.cuda.synchronize()
