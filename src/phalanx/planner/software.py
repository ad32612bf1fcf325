"""Efficiency constants of training programs on hardware: a few named values per program.

The constants are fitted to published runs of the program (benchmarks/planner/), over hardware of
several vendors together and never to a single run. Hardware limits are in hardware.py.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from phalanx.errors import ConfigError, nearest
from phalanx.planner.machine import Device


@dataclass(frozen=True, kw_only=True)
class Software:
    """Efficiency constants of one training program.

    Attributes:
        products: speed of large matrix products, relative to the typical speed on the device.
        attention: speed of a fused attention kernel, relative to the typical speed on the device.
        grouped: speed of grouped products of experts, relative to other products of as many tiles.
        speed_up: speed of other products in 8 or 4 bits, relative to 16 bits; published runs with
            experts gain nothing in grouped products, whose rows are converted expert by expert.
        fusion: bytes that memory-bound operations move, relative to unfused operators.
        launch_s: host time to launch one operation, backward's and Python's included; see
            benchmarks/gpu/README.md.
        has_scores: attention writes its scores to memory, and computes masked scores too.
        overlap: fraction of compute time that can overlap gradient and weight communication.
        inner_bandwidth: fraction of the link bandwidth that collectives reach within a unit.
        outer_bandwidth: fraction of the link bandwidth that collectives reach between units.
        call_s: fixed time of a collective in addition to the latency of its links.
        entry_s: host time that each rank adds to a tp collective while pipeline messages between
            units are in flight, because ranks enter one after another.
        kept: saved activation bytes, relative to fused kernels.
        logit_bytes: bytes held per logit of a microbatch; 0 if the loss runs in chunks.
        has_plain_ring: a ring on a GPU attends in plain operators, not in a fused kernel.
        sends_parts: each tp rank sends a part of the output to the next stage.
        sends_rows_once: ep sends a row once to each other unit, however many of its experts are
            there, and from one rank of tp (DeepEP; DeepSeek-AI, DeepSeek-V3, 2024, section 3.2.2).
    """

    name: str
    products: float = 1.0
    attention: float = 1.0
    grouped: float = 0.5
    speed_up: float = 1.0
    fusion: float = 1.0
    launch_s: float = 40e-6
    has_scores: bool = False
    overlap: float = 0.8
    inner_bandwidth: float = 0.8
    outer_bandwidth: float = 0.7
    call_s: float = 10e-6
    entry_s: float = 0.0
    kept: float = 1.0
    logit_bytes: int = 0
    has_plain_ring: bool = False
    sends_parts: bool = False
    sends_rows_once: bool = False


_SOFTWARE = (
    Software(name="phalanx", has_plain_ring=True),
    Software(name="compiled", fusion=0.5, launch_s=25e-6),
    Software(name="megatron", products=1.04, fusion=0.35, has_scores=True, overlap=0.47,
             inner_bandwidth=0.91, outer_bandwidth=0.14, sends_parts=True),
    Software(name="megatron-deepspeed", products=0.87, fusion=0.63,
             has_scores=True, overlap=0.98, inner_bandwidth=0.45, outer_bandwidth=0.78,
             sends_parts=True),
    Software(name="megatron-core", products=1.2, attention=1.2, fusion=0.72, overlap=0.29,
             inner_bandwidth=0.89, outer_bandwidth=0.76, sends_rows_once=True),
    Software(name="llm-foundry", products=0.95, attention=0.95, fusion=0.96, overlap=0.82,
             inner_bandwidth=0.79),
    Software(name="nanotron", products=0.93, attention=0.81, fusion=0.44,
             overlap=0.35, inner_bandwidth=0.98, outer_bandwidth=0.90, entry_s=220e-6, kept=1.1,
             logit_bytes=8),
    Software(name="maxtext", products=1.12, attention=0.66, fusion=0.93, overlap=0.63,
             inner_bandwidth=0.98, outer_bandwidth=0.68),
)  # fmt: skip

TYPICAL: Final = "typical"
"""Name of the constants for an unknown program."""

_DEVICES: Final = {
    "v100": (0.74, 0.30),  # not fitted: as A100
    "a100": (0.72, 0.34),
    "h100": (0.58, 0.18),
    "b200": (0.58, 0.32),
    "tpu": (0.89, 0.18),
}
"""Fractions of the 16-bit peak that training sustains in large products, and in fused attention, by
device family: clocks fall under load, and peaks have grown faster than memory bandwidth."""

_FAMILIES: Final = {
    **{"a100-40": "a100", "h200": "h100", "gb200": "b200", "b300": "b200", "gb300": "b200"},
    **{name: "tpu" for name in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "trainium2")},
}


def on_device(software: Software, device: Device) -> tuple[float, float]:
    """Return the fractions of the 16-bit peak that products and fused attention reach.

    For a device without published runs, these are based on 0.8 and 0.4 of `matmul_efficiency`.
    """
    family = _FAMILIES.get(device.name, device.name)
    sustained = 0.8 * device.matmul_efficiency, 0.4 * device.matmul_efficiency
    products, attention = _DEVICES.get(family, sustained)
    products = min(1.0, products * software.products) * software.speed_up
    return products, min(1.0, attention * software.attention)


def typical(without: str = "") -> Software:
    """Return the constants for an unknown program: medians over the programs other than Phalanx.

    `entry_s`, `logit_bytes` and the flags keep their defaults.

    Args:
        without: name of a program to exclude from the medians.
    """
    others = [each for each in _SOFTWARE[1:] if each.name != without]
    medians = {
        field.name: statistics.median(getattr(each, field.name) for each in others)
        for field in dataclasses.fields(Software)
        if field.type == "float" and field.name != "entry_s"
    }
    return Software(name=TYPICAL, **medians)


SOFTWARE: Final[Mapping[str, Software]] = MappingProxyType(
    {each.name: each for each in (*_SOFTWARE, typical())}
)
"""Name -> software."""


DEFAULT: Final = SOFTWARE["phalanx"]
"""Constants of Phalanx in eager mode."""


def software(name: str) -> Software:
    """Return the constants of a training program.

    Raises:
        ConfigError: there are no constants for this name.
    """
    if name not in SOFTWARE:
        raise ConfigError(
            f"{name!r} is not software that the planner models{nearest(name, SOFTWARE)}; expected "
            f"one of {', '.join(SOFTWARE)}"
        )
    return SOFTWARE[name]
