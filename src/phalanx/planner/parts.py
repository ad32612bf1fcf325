"""Seconds of the parts of a model, for one microbatch on one rank."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import NamedTuple

from phalanx.account.count import Case, kind_of
from phalanx.account.work import work_of
from phalanx.planner import roofline
from phalanx.planner.machine import Device
from phalanx.planner.planned import PlannedStep
from phalanx.planner.software import Software


class PartSeconds(NamedTuple):
    """Seconds of the parts of `Work`, and of attention in a block, forward and backward."""

    inputs: float
    block: float
    backward: float
    again: float
    head: float
    attention: float


def part_seconds(
    planned: PlannedStep, device: Device, software: Software, window: int | None
) -> PartSeconds:
    """Return the seconds of the parts of a step, with blocks of one `window`.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    strategy, kept = planned.strategy, planned.strategy.recompute
    if kept.segment_size(planned.shape.num_layers) is not None:
        kept = dataclasses.replace(kept, kind="full", option=None)
    case = Case(
        shape=kind_of(planned.shape, window, planned.seq_len),
        strategy=dataclasses.replace(strategy.of_block, recompute=kept),
        seq_len=planned.seq_len,
        num_sequences=planned.microbatch,
        precision=planned.precision,
        device="cpu" if device.kind == "cpu" else "cuda",
        has_casts=strategy.tp.degree == strategy.fsdp.degree == 1,
    )
    return _of_case(case, device, software)


@functools.lru_cache(maxsize=1 << 14)
def _of_case(case: Case, device: Device, software: Software) -> PartSeconds:
    work = work_of(case)
    attention = [each for part in work for each in part if each.scores]
    return PartSeconds(
        *(roofline.seconds(part, device, software) for part in work),
        attention=sum(roofline.seconds([each], device, software) for each in attention),
    )


def model_seconds(planned: PlannedStep, device: Device, software: Software) -> float:
    """Return the seconds that all operations of one microbatch take on one rank, without pp.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    shape = planned.shape
    windows = Counter(shape.window_of(number) for number in range(shape.num_layers))
    total = 0.0
    for number, (window, num_blocks) in enumerate(windows.items()):
        of = part_seconds(planned, device, software, window)
        total += num_blocks * (of.block + of.backward + of.again)
        total += of.inputs + of.head if number == 0 else 0.0
    return total
