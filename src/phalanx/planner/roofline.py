"""How long the operations of a microbatch take on a device: a roofline, with measured efficiency.

    product     max(FLOPs / (peak x products x shape), bytes / bandwidth)
    attention   FLOPs / (peak x attention); where its scores lie in memory, as products and bytes
    others      fusion x bytes / bandwidth
    launch      launch_s each of the processor, which runs ahead of the device

    shape = k / (k + K0) x sqrt(tiles / (waves x SMs)) x UNALIGNED, where no multiple of 64 is cut

A product of few tiles leaves SMs idle in its last wave (NVIDIA, Matrix multiplication background
user guide, section 4); a short inner size k has little to hide its loads behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from phalanx.account.work import Operation
from phalanx.planner.machine import Device
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
    operations: Sequence[Operation], device: Device, software: Software
) -> tuple[float, float]:
    """Return how long operations take a device one after another, and their launch the host."""
    of_device = sum(_seconds(each, device, software) for each in operations)
    return of_device, software.launch_s * len(operations)


def _seconds(of: Operation, device: Device, software: Software) -> float:
    bandwidth = device.bandwidth * MEMORY
    products, attention = on_device(software, device)
    if of.product[0]:
        efficiency = products * _shape(of.product, device)
        return max(of.flops / (device.flops * efficiency), of.num_bytes / bandwidth)
    if not of.scores:
        return software.fusion * of.num_bytes / bandwidth
    if not software.has_scores:
        return of.flops / (device.flops * attention)
    is_backward = "backward" in of.name
    in_products_s = of.flops * _UNMASKED[is_backward] / (device.flops * products * _BATCHED)
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
