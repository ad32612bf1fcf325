"""Compute time of the links of a model, for one microbatch on one rank.

The time of operations is a roofline with measured efficiencies:

    product     max(FLOPs / (peak x products x shape), bytes / bandwidth)
    attention   FLOPs / (peak x attention); if scores are stored in memory, as products and bytes
    others      fusion x bytes / bandwidth
    launch      launch_s per operation on the host CPU, which runs ahead of the device
    on CPU      products and attention at their measured rates, others fusion x bytes / bandwidth,
                and a fixed time for each operator

    shape = k / (k + K0) x sqrt(tiles / (waves x SMs)), x UNALIGNED if k or columns % 64 is not 0

A product of few tiles leaves SMs idle in its last wave (NVIDIA, Matrix multiplication background
user guide, section 4). A short inner size k gives little compute to overlap with loads.

A grouped product of experts runs the tiles of all of them in one call. An expert of few rows fills
a part of its last tile, which counts as a whole one; in a weight's gradient few rows are a short k.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from phalanx.account.count import Case, Work, one_block_shape, work_of
from phalanx.account.module import AnyModule
from phalanx.account.parameters import BlockKind, block_kinds
from phalanx.account.planned import DecoderModel, PlannedStep
from phalanx.account.recorder import Operation
from phalanx.planner.machine import Core, Device
from phalanx.planner.software import Software, on_device
from phalanx.strategy import Strategy

_TILE: Final = 128, 256
"""Rows and columns of the output tile that an SM computes at a time."""

_K0: Final = 194
"""Inner size at which a product reaches half of its maximum speed."""

_UNALIGNED: Final = 0.74
"""Relative speed of a product with columns or an inner size that is no multiple of 64 elements."""

MEMORY: Final = 0.86
"""Fraction of memory bandwidth that streaming kernels reach."""

_BATCHED: Final = 0.70
"""Speed of batched per-head products, relative to large products."""

_PASSES: Final = {False: 6, True: 11}
"""Number of reads and writes of stored scores, in forward (False) and in backward (True)."""

_UNMASKED: Final = {False: 2.0, True: 1.6}
"""FLOPs of attention with stored scores / FLOPs of the fused kernel, which skips masked scores."""


def operation_seconds(
    operations: Sequence[Operation], device: Device, software: Software, precision: str
) -> tuple[float, float]:
    """Return the device seconds of operations in sequence, and the host seconds to launch them.

    On CPU, the host seconds are 0, because launches are part of the operations. Every data type
    reaches the same fraction of its peak as 16 bits.

    Raises:
        ConfigError: the device has no peak in this data type.
    """
    if device.core is not None:
        return _on_cores(operations, device, device.core, software, precision), 0.0
    peak = device.peak(precision)
    of_device = sum(_seconds(each, device, software, peak) for each in operations)
    return of_device, software.launch_s * len(operations)


_RING: Final = {False: (28, 48), True: (27, 86)}
"""Operators of a block of queries of a ring's plain attention, and bytes that they read and write
for each score, in forward (False) and in backward (True), as parallel/context/partial.py runs."""


def _plain_ring(
    of: Operation, num_blocks: int, device: Device, software: Software, precision: str
) -> tuple[float, float]:
    """Return the device and host seconds of a ring's attention in plain operators on a GPU.

    Args:
        of: the attention of this rank's queries to a whole row; half of its scores are masked.
        num_blocks: blocks of queries, each with the keys of one chunk.
        device: the GPU.
        software: constants of the training program.
        precision: data type of the products.
    """
    operators, score_bytes = _RING["backward" in of.name]
    peak = device.peak(precision) * on_device(software, device)[0] * _BATCHED
    in_memory_s = score_bytes * of.scores / 2 / (device.bandwidth * MEMORY)
    return of.flops / peak + in_memory_s, software.launch_s * operators * num_blocks


def _on_cores(
    operations: Sequence[Operation],
    device: Device,
    core: Core,
    software: Software,
    precision: str,
) -> float:
    """Return the seconds on a rank's cores; with less than one core, as if it had a whole core."""
    # A rank on half a core is slower than half as fast: ranks that share a core take turns in each
    # other's caches. So the time alone on a whole core is scaled by (1 / cores) ^ crowd.
    cores = max(1.0, device.cores)
    flops = {True: 0, False: 0}
    num_bytes = 0
    for each in operations:
        flops[bool(each.product[0])] += each.flops
        num_bytes += 0 if each.flops else each.num_bytes
    rates: list[float] = []
    for of in (core.products, core.attention):  # unmeasured: the slowest, or half of it in 64 bits
        slowest = min(of.values())
        otherwise = slowest / 2 if precision == "float64" else slowest
        rates.append(cores * of.get(precision, otherwise))
    rate, attention = rates
    in_memory_s = software.fusion * num_bytes * device.cores / device.bandwidth / cores
    each_s = core.operator_s * len(operations)
    alone_s = flops[True] / rate + flops[False] / attention + in_memory_s + each_s
    return alone_s * max(1.0, 1 / device.cores) ** core.crowd * core.in_step


def _seconds(of: Operation, device: Device, software: Software, peak: float) -> float:
    bandwidth = device.bandwidth * MEMORY
    products, attention = on_device(software, device)
    if of.product[0]:
        rows, columns, inner = of.product
        shape = inner / (inner + _K0)  # relative to a large square product
        if device.chip is not None:
            #     132 SMs, 150 tiles    wave 1  132 tiles    wave 2  18 tiles, 114 SMs idle
            #
            # Of the 264 places of two waves 150 are used, 57 %; the speed counts as the root, 75 %.
            tiles = of.groups * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
            shape *= math.sqrt(tiles / (math.ceil(tiles / device.chip.sms) * device.chip.sms))
            if of.groups > 1:
                shape *= rows / (math.ceil(rows / _TILE[0]) * _TILE[0])
            elif columns % 64 or inner % 64:
                shape *= _UNALIGNED
        efficiency = products * shape
        if of.groups > 1:
            efficiency *= software.grouped / software.speed_up
        return max(of.flops / (peak * efficiency), of.num_bytes / bandwidth)
    if not of.scores:
        return software.fusion * of.num_bytes / bandwidth
    if not software.has_scores:
        return of.flops / (peak * attention)
    is_backward = "backward" in of.name
    in_products_s = of.flops * _UNMASKED[is_backward] / (peak * products * _BATCHED)
    return in_products_s + _PASSES[is_backward] * 2 * of.scores / bandwidth


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
    step: PlannedStep[DecoderModel], device: Device, software: Software, kind: BlockKind
) -> PartSeconds:
    """Return the times of the parts of a model whose blocks are of one kind.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    model, strategy, kept = step.model, step.strategy, step.strategy.recompute
    if kept.segment_size(model.shape.num_layers) is not None:
        kept = dataclasses.replace(kept, kind="full", option=None)
    case = Case(
        shape=one_block_shape(model.shape, kind, model.seq_len),
        strategy=dataclasses.replace(strategy.of_block, recompute=kept),
        seq_len=model.seq_len,
        num_sequences=step.microbatch,
        precision=model.precision,
        has_documents=model.has_documents,
        device="cpu" if device.kind == "cpu" else "cuda",
        has_casts=strategy.tp.degree == strategy.fsdp.degree == 1,
    )
    busiest = model.imbalance if strategy.ep.degree > 1 else 1.0
    return _of_case(case, device, software, busiest)


@functools.lru_cache(maxsize=1 << 14)
def _of_case(case: Case, device: Device, software: Software, imbalance: float) -> PartSeconds:
    work = Work(*(tuple(_of_busiest(op, imbalance) for op in part) for part in work_of(case)))
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
        spent = [operation_seconds(fused, device, software, case.precision)]
        if is_plain:
            # Of 2 x ranks chunks, a rank has an early and a late one, so that causal work is even:
            #
            #     rank 0   [0             7]    0 to 0; 7 to 0 .. 7       9 pairs of chunks
            #     rank 1      [1       6]       1 to 0, 1; 6 to 0 .. 6    9
            #
            # So each rank runs 2 x ranks + 1 pairs, in blocks of at most _MOST_QUERIES queries.
            chunk = max(1, case.seq_len // (2 * ranks))
            num_blocks = case.num_sequences * (2 * ranks + 1) * math.ceil(chunk / _MOST_QUERIES)
            spent += [
                _plain_ring(each, num_blocks, device, software, case.precision)
                for each in part
                if each.scores
            ]
        return DeviceHostSeconds(*map(sum, zip(*spent, strict=True)))

    attention = [each for part in work for each in part if each.scores]
    return PartSeconds(*map(seconds, work), attention=seconds(attention).device)


def _of_busiest(of: Operation, imbalance: float) -> Operation:
    """Return a grouped product with the rows of the rank whose experts get the most."""
    if of.groups == 1 or imbalance == 1:
        return of
    rows, columns, inner = of.product
    # Of a weight's gradient the rows of all experts are the inner size, which does not change its
    # speed much: its FLOPs alone grow.
    return of._replace(
        flops=round(of.flops * imbalance), product=(round(rows * imbalance), columns, inner)
    )


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
        has_experts: whether ep communicates in the link.
        sent_bytes: bytes of its output; None if the plan's traffic has them.
    """

    forward: DeviceHostSeconds
    backward: DeviceHostSeconds
    attention: float = 0.0
    is_block: bool = False
    has_experts: bool = False
    sent_bytes: int | None = None


def link_seconds(step: PlannedStep[Any], device: Device, software: Software) -> list[LinkSeconds]:
    """Return the times of each link of a model.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    if isinstance(step.model, AnyModule):
        again = step.model.recomputes(step.strategy)

        def alone(operations: Sequence[Operation]) -> float:
            return max(operation_seconds(operations, device, software, step.precision))

        links: list[LinkSeconds] = []
        for link in step.model.links(step.microbatch):
            forward_s, backward_s = alone(link.forward), alone(link.backward)
            backward_s += forward_s if again and link.is_block else 0.0
            of = DeviceHostSeconds(forward_s, 0.0), DeviceHostSeconds(backward_s, 0.0)
            links.append(LinkSeconds(*of, sent_bytes=link.output))
        return links
    shape = step.model.shape
    kinds = block_kinds(shape)
    parts = {each: part_seconds(step, device, software, each) for each in dict.fromkeys(kinds)}
    blocks = {
        kind: LinkSeconds(
            *(of.block, of.again_and_backward, of.attention),
            is_block=True,
            has_experts=kind.has_experts,
        )
        for kind, of in parts.items()
    }
    first = parts[kinds[0]]
    ends = [LinkSeconds(of, NOTHING) for of in (first.inputs, first.head)]
    return [ends[0], *(blocks[kind] for kind in kinds), ends[1]]
