"""How long the operations of a microbatch take on a device: a roofline, with measured efficiency.

    product     max(FLOPs / (peak x products x shape), bytes / bandwidth)
    attention   FLOPs / (peak x attention); where its scores lie in memory, as products and bytes
    others      fusion x bytes / bandwidth
    launch      launch_s each of the processor, which runs ahead of the device
    on a core   products and attention at their measured rates, others bytes / bandwidth, and each
                operator a time of its own

    shape = k / (k + K0) x sqrt(tiles / (waves x SMs)) x UNALIGNED, where no multiple of 64 is cut

A product of few tiles leaves SMs idle in its last wave (NVIDIA, Matrix multiplication background
user guide, section 4); a short inner size k has little to hide its loads behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.account.work import Operation
from phalanx.planner.machine import Core, Device
from phalanx.planner.software import Software, on_device

_TILE: Final = 128, 256
"""Rows and columns of the result that an SM makes at a time."""

_K0: Final = 194
"""Inner size at which a product reaches half of its speed."""

_UNALIGNED: Final = 0.74
"""Speed of a product of which a size is no multiple of 64 elements."""

MEMORY: Final = 0.86
"""Part of the memory's bandwidth that streaming kernels reach."""

_BATCHED: Final = 0.70
"""Speed of the products of heads, one by one, beside large ones."""

_PASSES: Final = {False: 6, True: 11}
"""How often forward, and backward, reads or writes scores that lie in memory."""

_UNMASKED: Final = {False: 2.0, True: 1.6}
"""FLOPs of such attention beside the fused kernel's, which skips what the mask hides."""


def seconds(
    operations: Sequence[Operation], device: Device, software: Software, precision: str
) -> tuple[float, float]:
    """Return how long operations take a device one after another, and their launch the host.

    A processor launches what it runs itself: there the second is 0. Other data types reach the
    part of their peak that 16 bits reach of theirs.

    Raises:
        ConfigError: no peak of the device in this data type is known.
    """
    if device.core is not None:
        return _on_cores(operations, device, device.core, software, precision), 0.0
    peak = device.peak(precision)
    of_device = sum(_seconds(each, device, software, peak) for each in operations)
    return of_device, software.launch_s * len(operations)


def _on_cores(
    operations: Sequence[Operation],
    device: Device,
    core: Core,
    software: Software,
    precision: str,
) -> float:
    """Return how long a rank's cores take; of less than one, as if it had it for itself."""
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
    """Return the rate in a data type; of one that was not measured, by the slowest's width."""
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
    """Return the efficiency of a product of this shape beside a large square one."""
    rows, columns, inner = product
    efficiency = inner / (inner + _K0)
    if device.chip is not None:
        tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
        efficiency *= math.sqrt(tiles / (math.ceil(tiles / device.chip.sms) * device.chip.sms))
        efficiency *= _UNALIGNED if columns % 64 or inner % 64 else 1.0
    return efficiency
