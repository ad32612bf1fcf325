"""Compute time of the parts of a model, for one microbatch on one rank."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from phalanx.account.count import Case, Work, one_block_shape, work_of
from phalanx.account.module import AnyModule
from phalanx.account.recorder import Operation
from phalanx.account.step import DecoderModel, PlannedStep
from phalanx.planner import roofline
from phalanx.planner.machine import Device
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
    step: PlannedStep[DecoderModel], device: Device, software: Software, window: int | None
) -> PartSeconds:
    """Return the times of the parts of a model whose blocks have the window `window`.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    model, strategy, kept = step.model, step.strategy, step.strategy.recompute
    if kept.segment_size(model.shape.num_layers) is not None:
        kept = dataclasses.replace(kept, kind="full", option=None)
    case = Case(
        shape=one_block_shape(model.shape, window, model.seq_len),
        strategy=dataclasses.replace(strategy.of_block, recompute=kept),
        seq_len=model.seq_len,
        num_sequences=step.microbatch,
        precision=model.precision,
        has_documents=model.has_documents,
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
        work = Work(
            *(
                tuple(
                    op._replace(flops=round(op.flops * slowdown)) if op.scores else op
                    for op in part
                )
                for part in work
            )
        )
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


class LinkSeconds(NamedTuple):
    """Times of a link of a chain for one microbatch on one rank.

    Attributes:
        forward: its forward; of a decoder's head, its backward too.
        backward: its backward and recomputation.
        attention: device seconds of attention in both.
        is_block: whether tp and rings communicate in the link.
        sent_bytes: bytes of its output; None if the plan's traffic has them.
    """

    forward: DeviceHostSeconds
    backward: DeviceHostSeconds
    attention: float = 0.0
    is_block: bool = False
    sent_bytes: int | None = None


def link_seconds(step: PlannedStep[Any], device: Device, software: Software) -> list[LinkSeconds]:
    """Return the times of each link of a model.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    if isinstance(step.model, AnyModule):
        again = step.model.recomputes(step.strategy)

        def alone(operations: Sequence[Operation]) -> float:
            return max(roofline.seconds(operations, device, software, step.precision))

        links: list[LinkSeconds] = []
        for link in step.model.links(step.microbatch):
            forward_s, backward_s = alone(link.forward), alone(link.backward)
            backward_s += forward_s if again and link.is_block else 0.0
            of = DeviceHostSeconds(forward_s, 0.0), DeviceHostSeconds(backward_s, 0.0)
            links.append(LinkSeconds(*of, sent_bytes=link.output))
        return links
    shape = step.model.shape
    windows = [shape.window_of(number) for number in range(shape.num_layers)]
    parts = {each: part_seconds(step, device, software, each) for each in dict.fromkeys(windows)}
    blocks = {
        window: LinkSeconds(of.block, of.again_and_backward, of.attention, is_block=True)
        for window, of in parts.items()
    }
    first = parts[windows[0]]
    ends = [LinkSeconds(of, NOTHING) for of in (first.inputs, first.head)]
    return [ends[0], *(blocks[window] for window in windows), ends[1]]
