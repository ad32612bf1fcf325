"""Time of a microbatch's operations on a device, by a roofline model with measured efficiencies.

    product     max(FLOPs / (peak x products x shape), bytes / bandwidth)
    attention   FLOPs / (peak x attention); if scores are stored in memory, as products and bytes
    others      fusion x bytes / bandwidth
    launch      launch_s per operation on the host CPU, which runs ahead of the device
    on CPU      products and attention at their measured rates, others fusion x bytes / bandwidth,
                and a fixed time for each operator

    shape = k / (k + K0) x sqrt(tiles / (waves x SMs)), x UNALIGNED if k or columns % 64 is not 0

A product of few tiles leaves SMs idle in its last wave (NVIDIA, Matrix multiplication background
user guide, section 4). A short inner size k gives little compute to overlap with loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.account.recorder import Operation
from phalanx.planner.machine import Core, Device
from phalanx.planner.software import Software, on_device

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


def seconds(
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


def plain_ring(
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
    cores = max(1.0, device.cores)
    flops = {True: 0, False: 0}
    num_bytes = 0
    for each in operations:
        flops[bool(each.product[0])] += each.flops
        num_bytes += 0 if each.flops else each.num_bytes
    rate, attention = (cores * _rate(of, precision) for of in (core.products, core.attention))
    in_memory_s = software.fusion * num_bytes * device.cores / device.bandwidth / cores
    each_s = core.operator_s * len(operations)
    alone_s = flops[True] / rate + flops[False] / attention + in_memory_s + each_s
    return alone_s * max(1.0, 1 / device.cores) ** core.crowd * core.in_step


def _rate(of: Mapping[str, float], precision: str) -> float:
    """Return the rate in a data type; if unmeasured, the slowest rate, or half of it in 64 bits."""
    slowest = min(of.values())
    return of.get(precision, slowest / 2 if precision == "float64" else slowest)


def _seconds(of: Operation, device: Device, software: Software, peak: float) -> float:
    bandwidth = device.bandwidth * MEMORY
    products, attention = on_device(software, device)
    if of.product[0]:
        efficiency = products * _shape(of.product, device)
        return max(of.flops / (peak * efficiency), of.num_bytes / bandwidth)
    if not of.scores:
        return software.fusion * of.num_bytes / bandwidth
    if not software.has_scores:
        return of.flops / (peak * attention)
    is_backward = "backward" in of.name
    in_products_s = of.flops * _UNMASKED[is_backward] / (peak * products * _BATCHED)
    return in_products_s + _PASSES[is_backward] * 2 * of.scores / bandwidth


def _shape(product: tuple[int, int, int], device: Device) -> float:
    """Return the efficiency of a product of this shape, relative to a large square product."""
    rows, columns, inner = product
    efficiency = inner / (inner + _K0)
    if device.chip is not None:
        tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
        efficiency *= math.sqrt(tiles / (math.ceil(tiles / device.chip.sms) * device.chip.sms))
        efficiency *= _UNALIGNED if columns % 64 or inner % 64 else 1.0
    return efficiency
