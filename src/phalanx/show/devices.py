"""The hardware catalogue: a cluster, a device beside others, and all devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from phalanx.config.fields import Positional
from phalanx.errors import ConfigError
from phalanx.planner import hardware
from phalanx.planner.chart import draw_devices
from phalanx.planner.machine import Device, Level
from phalanx.report.tabular import Number, Table
from phalanx.report.units import si
from phalanx.show.shown import Shown

BESIDE: Final = ("v100", "a100-40", "a100", "h100", "h200", "b200", "mi300x", "tpu-v5p")
"""Devices in the comparison table of `phalanx show device`."""


@dataclass(frozen=True, kw_only=True)
class ShowCluster:
    """Show a cluster: the totals of its devices, and which link joins which of them."""

    name: Annotated[str | None, Positional("NAME[:DEVICES]")] = None
    """A cluster of the catalogue, as h100-llama3; or DEVICE:COUNT, as h100:64; or this, the machine
    at hand."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ShowDevice:
    """Show a device: from the SM to the peak, and the FLOPs for a byte beside other devices."""

    name: Annotated[str | None, Positional("NAME")] = None
    """A device of the catalogue, as h100; or this, the one at hand."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ShowDevices:
    """Show all devices of the catalogue."""

    svg: str | None = None
    """Draw peak, bandwidth and memory over the years into this file."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def show_cluster(config: ShowCluster) -> Shown:
    """Show the totals of a cluster, and its levels, innermost first."""
    cluster = hardware.cluster(_named(config.name, "cluster NAME[:DEVICES]", "h100-llama3"))
    totals, rows, inner = cluster.totals, list[Sequence[str]](), None
    sums = [f"{si(totals.flops, 'FLOP/s')} dense"]
    if totals.fp32_cores:
        sums += [si(totals.fp32_cores, "FP32 cores"), si(totals.tensor_cores, "tensor cores")]
    sums += [f"{si(totals.memory_bytes, 'B')} of memory"]
    for level in cluster.levels:
        rows.append(_level_row(level, inner, min(level.devices, cluster.num_devices)))
        inner = level
    heads = ("level", "devices", "consists of", "joined by", "a device, one way", "a hop")
    links = dict.fromkeys(level.link for level in cluster.levels)
    return Shown(
        f"{cluster.name}: {cluster.num_devices:,} x {cluster.title}",
        [f"totals: {', '.join(sums)}"],
        [
            Table("", heads, rows, [heads[1], *heads[4:]]),
            *(f"{link.name}: {link.source} ({link.date})" for link in links),
        ],
        document=cluster,
    )


def _level_row(level: Level, inner: Level | None, num_devices: int) -> Sequence[str]:
    parts = "devices"
    if inner is not None:
        parts = f"{math.ceil(num_devices / inner.devices):,} {inner.name}s"
    speed, hop_us = si(level.link.bandwidth, "B/s"), 1e6 * level.link.latency_s
    return level.name, f"{num_devices:,}", parts, level.link.name, speed, f"{hop_us:.3g} us"


def show_device(config: ShowDevice) -> Shown:
    """Show a device from one SM to the peak, and beside other devices."""
    one = hardware.device(_named(config.name, "device NAME", "h100"))
    rows = list[tuple[str, str]]()
    if (chip := one.chip) is not None:
        kib, mib = 1024, 1024**2
        fp32, tensor = chip.fp32_cores_per_sm, chip.tensor_cores_per_sm
        registers = chip.registers_bytes_per_sm
        rows += [
            (
                "an SM",
                f"{fp32} FP32 cores, {tensor} tensor cores, {registers // kib} KiB of registers, "
                f"{chip.shared_bytes_per_sm // kib} KiB of shared memory",
            ),
            ("SMs", f"{chip.sms_built} built, {chip.sms} enabled"),
            (
                "all SMs",
                f"{chip.sms * fp32:,} FP32 cores, {chip.sms * tensor:,} tensor cores, "
                f"{chip.sms * registers / mib:.3g} MiB of registers",
            ),
            ("L2 cache", f"{chip.l2_bytes // mib} MiB"),
            (
                "16-bit products",
                f"{chip.sms} SMs x {chip.flops_per_clock:,} FLOPs a clock x "
                f"{chip.clock_hz / 1e9:.4g} GHz = {si(chip.flops, 'FLOP/s')}",
            ),
            ("chip source", chip.source),
        ]
    peaks = ", ".join(f"{name} {si(rate, 'FLOP/s')}" for name, rate in one.peak_flops.items())
    attained = si(one.matmul_efficiency * one.flops, "FLOP/s")
    memory = f"{si(one.memory_bytes, 'B')} ({one.usable_bytes / 2**30:.1f} GiB found)"
    rows += [
        ("dense peaks", peaks),
        ("attainable", f"{one.matmul_efficiency:.0%} = {attained} ({one.efficiency_source})"),
        ("memory", f"{memory}, {si(one.bandwidth, 'B/s')}"),
        ("balance", f"{one.flops_per_byte:.0f} FLOPs a byte of memory"),
        ("source", f"{one.source} ({one.date})"),
    ]
    beside = {name: hardware.DEVICES[name] for name in BESIDE} | {one.name: one}
    others = sorted(beside.values(), key=lambda other: (other.year, other.flops))
    parts: list[Table | str] = [Table("", ["part", one.name], rows), _grid_of(others)]
    if (before := predecessor(one)) is not None:
        parts.append(compared(before, one))
    return Shown(f"{one.name}: {one.title}, {one.year}", [], parts, document=one)


def show_devices(config: ShowDevices) -> Shown:
    """Show all devices."""
    del config
    devices = hardware.DEVICES
    return Shown("devices", [], [_grid_of(devices.values())], document=devices)


def draw(shown: Shown, path: Path) -> None:
    """Draw peak, bandwidth and memory of all devices over the years."""
    del shown
    draw_devices(list(hardware.DEVICES.values()), path)


def _grid_of(devices: Iterable[Device]) -> Table:
    heads = (
        *("device", "", "year"),
        *(Number(name, _three_digits, 1e12) for name in ("TFLOP/s", "attainable")),
        *(Number("GB", ".3g", 1e9), Number("TB/s", ".4g", 1e12), Number("FLOPs a byte", ".0f")),
    )
    rows = [
        (
            one.name,
            one.title,
            str(one.year),
            *(one.flops, one.matmul_efficiency * one.flops),
            *(one.memory_bytes, one.bandwidth, one.flops_per_byte),
        )
        for one in devices
    ]
    return Table("", heads, rows, ["year"])


def predecessor(one: Device) -> Device | None:
    """Return the vendor's latest device of an earlier year, the first of several; or None."""
    if one.name not in hardware.DEVICES:
        return None
    maker = one.title.split()[0]
    older = [
        other
        for other in hardware.DEVICES.values()
        if other.year < one.year and other.title.split()[0] == maker
    ]
    return max(older, key=lambda other: other.year, default=None)


def compared(before: Device, one: Device) -> str:
    """Return a text on the ratios of FLOP/s and bandwidth, and their effect on the MFU."""
    flops, bandwidth = one.flops / before.flops, one.bandwidth / before.bandwidth
    text = (
        f"From {before.title} to {one.title}: {flops:.1f}x the FLOP/s, {bandwidth:.1f}x the memory "
        f"bandwidth; compute-bound work needs {one.flops_per_byte:.0f} FLOPs per byte instead of "
        f"{before.flops_per_byte:.0f}."
    )
    if flops > bandwidth:
        return (
            f"{text} Memory-bound work takes a larger part of a step, so the MFU of one model "
            "falls although the step is shorter."
        )
    return f"{text} Memory-bound work takes a smaller part of a step, so the MFU can rise."


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _named(name: str | None, form: str, example: str) -> str:
    """Return the name; if it is None, raise ConfigError with the expected command."""
    if name is None:
        kind = form.split()[0]
        raise ConfigError(
            f"the name of a {kind} is missing; expected: phalanx show {form}, such as {example}"
        )
    return name
