"""Compute time of the parts of a model, for one microbatch on one rank."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from phalanx.account.count import Case, Work, one_block_shape, work_of
from phalanx.account.recorder import Operation
from phalanx.models.shape import ModelShape
from phalanx.planner import roofline
from phalanx.planner.machine import Device
from phalanx.planner.planned import PlannedStep
from phalanx.planner.software import Software
from phalanx.strategy import Strategy


class DeviceHostSeconds(NamedTuple):
    """Seconds of operations: on the device, and on the host CPU that launches them ahead."""

    device: float
    host: float

    def with_collectives(self, comm: DeviceHostSeconds) -> float:
        """Return the seconds with collectives added: the larger of device time and host time."""
        return max(self.device + comm.device, self.host + comm.host)

    @property
    def alone(self) -> float:
        """Seconds without collectives: the larger of device time and host time."""
        return max(self)


NOTHING: Final = DeviceHostSeconds(0.0, 0.0)


class PartSeconds(NamedTuple):
    """Times of the parts of `Work`, and device seconds of attention over all these parts."""

    inputs: DeviceHostSeconds
    block: DeviceHostSeconds
    backward: DeviceHostSeconds
    recompute: DeviceHostSeconds
    head: DeviceHostSeconds
    attention: float

    @property
    def again_and_backward(self) -> DeviceHostSeconds:
        """Backward of a block, its recomputation included."""
        return DeviceHostSeconds(*map(sum, zip(self.recompute, self.backward, strict=True)))


def part_seconds(
    planned: PlannedStep, device: Device, software: Software, window: int | None
) -> PartSeconds:
    """Return the times of the parts of a model whose blocks have the window `window`.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    strategy, kept = planned.strategy, planned.strategy.recompute
    if kept.segment_size(planned.shape.num_layers) is not None:
        kept = dataclasses.replace(kept, kind="full", option=None)
    case = Case(
        shape=one_block_shape(planned.shape, window, planned.seq_len),
        strategy=dataclasses.replace(strategy.of_block, recompute=kept),
        seq_len=planned.seq_len,
        num_sequences=planned.microbatch,
        precision=planned.precision,
        has_documents=planned.has_documents,
        device="cpu" if device.kind == "cpu" else "cuda",
        has_casts=strategy.tp.degree == strategy.fsdp.degree == 1,
    )
    return _of_case(case, device, software)


@functools.lru_cache(maxsize=1 << 14)
def _of_case(case: Case, device: Device, software: Software) -> PartSeconds:
    work = work_of(case)
    ranks = case.strategy.ring_ranks
    if device.core is not None:
        slowdown = ring_slowdown(case.strategy, case.seq_len, case.precision)
        work = Work(*(tuple(_slowed(each, slowdown) for each in part) for part in work))
    is_plain = ranks > 1 and device.core is None and software.has_plain_ring

    def seconds(part: Iterable[Operation]) -> DeviceHostSeconds:
        fused = [each for each in part if not (is_plain and each.scores)]
        spent = [roofline.seconds(fused, device, software, case.precision)]
        if is_plain:
            chunk = max(1, case.seq_len // (2 * ranks))
            num_blocks = case.num_sequences * (2 * ranks + 1) * math.ceil(chunk / _MOST_QUERIES)
            spent += [
                roofline.plain_ring(each, num_blocks, device, software, case.precision)
                for each in part
                if each.scores
            ]
        return DeviceHostSeconds(*map(sum, zip(*spent, strict=True)))

    attention = [each for part in work for each in part if each.scores]
    return PartSeconds(*map(seconds, work), attention=seconds(attention).device)


_PLAIN, _FLASH = (1.25, 150.0), (1.0, 12.0)
_RING_COST: Final = {"float16": _PLAIN, "bfloat16": _PLAIN, "float32": _FLASH, "float64": _FLASH}
"""Precision -> factor and positions, by which a ring's attention on a CPU takes factor + positions
/ (positions of a chunk) times as long; `benchmarks/context/ring.py` measures it."""


_MOST_QUERIES: Final = 256
"""Queries in a block of a ring's plain operators (parallel/context/partial.py)."""


def ring_slowdown(strategy: Strategy, seq_len: int, precision: str) -> float:
    """Return the time of a ring's attention on a CPU / (attention to a full row / ranks)."""
    if (ranks := strategy.ring_ranks) == 1:
        return 1.0
    factor, positions = _RING_COST[precision]
    return factor + positions / max(1, seq_len // (2 * ranks))


def _slowed(of: Operation, slowdown: float) -> Operation:
    return of._replace(flops=round(of.flops * slowdown)) if of.scores else of


def model_spent(planned: PlannedStep, device: Device, software: Software) -> DeviceHostSeconds:
    """Return the times of all operations of one microbatch on one rank, without pp.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    windows = _windows(planned.shape)
    of_device = of_host = 0.0
    for number, (window, num_blocks) in enumerate(windows.items()):
        of = part_seconds(planned, device, software, window)
        parts = [(num_blocks, of.block), (num_blocks, of.again_and_backward)]
        parts += [(1, of.inputs), (1, of.head)] if number == 0 else []
        of_device += sum(num * part.device for num, part in parts)
        of_host += sum(num * part.host for num, part in parts)
    return DeviceHostSeconds(of_device, of_host)


@functools.lru_cache(maxsize=64)
def _windows(shape: ModelShape) -> Counter[int | None]:
    """Return the number of blocks of each window."""
    return Counter(shape.window_of(number) for number in range(shape.num_layers))
