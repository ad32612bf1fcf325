"""Peak arithmetic of devices by their makers' data sheets: dense products, never with sparsity.

A device that is not named exactly is unknown: a slice of a GPU (MIG), a laptop's part of the same
name and every CPU have other peaks, and a guess would make every MFU wrong. float16 and bfloat16
are rates with float32 accumulation, which is what torch asks for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

Arithmetic = Literal["bfloat16", "float16", "tf32", "float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A device's peak for one data type."""

    flops_per_s: float
    source: str
    """The document that states it."""


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """One device's peaks in TFLOP/s, as its maker prints them."""

    pattern: str
    """Regular expression for the whole name that the driver reports."""
    source: str
    tera: dict[Arithmetic, float]


def peak_of(name: str, arithmetic: Arithmetic) -> Peak | None:
    """Return the data-sheet peak of a device that the driver calls `name`; None if it is unknown.

    `tf32` is float32 data on tensor cores.
    """
    for sheet in data_sheets():
        if re.fullmatch(sheet.pattern, name, flags=re.IGNORECASE):
            tera = sheet.tera.get(arithmetic)
            return None if tera is None else Peak(flops_per_s=tera * 1e12, source=sheet.source)
    return None


def data_sheets() -> tuple[DataSheet, ...]:
    """Return the table: data centre GPUs newest first, then consumer ones."""
    hopper = {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 66.9}
    hopper_nvl = {"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float32": 60, "float64": 60}
    return (
        _sheet("NVIDIA GB200", "NVIDIA GB200 NVL72 data sheet", bfloat16=2500, tf32=1250),
        _sheet("NVIDIA B200", "NVIDIA HGX B200 data sheet", bfloat16=2250, tf32=1125, float32=75),
        _sheet("NVIDIA H200", "NVIDIA H200 SXM data sheet", **hopper),
        _sheet("NVIDIA H200 NVL", "NVIDIA H200 NVL data sheet", **hopper_nvl),
        _sheet("NVIDIA GH200 (480GB|144G HBM3e)", "NVIDIA GH200 data sheet", **hopper),
        _sheet("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5, H100 architecture paper", **hopper),
        _sheet("NVIDIA H100 NVL", "NVIDIA H100 NVL data sheet", **hopper_nvl),
        _sheet("NVIDIA H100 PCIe", "NVIDIA H100 PCIe data sheet",
               bfloat16=756, tf32=378, float32=51, float64=51),
        _sheet("(NVIDIA )?A100(-SXM4-(40|80)GB|-PCIE-40GB| 80GB PCIe)", "NVIDIA A100 data sheet",
               bfloat16=312, tf32=156, float32=19.5, float64=19.5),
        _sheet("(NVIDIA )?A40", "NVIDIA A40 data sheet", bfloat16=149.7, tf32=74.8, float32=37.4),
        _sheet("(NVIDIA )?A30", "NVIDIA A30 data sheet", bfloat16=165, tf32=82, float32=10.3),
        _sheet("(NVIDIA )?A10", "NVIDIA A10 data sheet", bfloat16=125, tf32=62.5, float32=31.2),
        _sheet("NVIDIA L40S", "NVIDIA L40S data sheet", bfloat16=362.05, tf32=183, float32=91.6),
        _sheet("NVIDIA L4", "NVIDIA L4 data sheet", bfloat16=121, tf32=60, float32=30.3),
        _sheet("(Tesla )?V100-SXM[23]-(16|32)GB(-LS)?", "NVIDIA V100 SXM2 data sheet",
               float16=125, float32=15.7, float64=7.8),
        _sheet("(Tesla )?V100-PCIE-(16|32)GB", "NVIDIA V100 PCIe data sheet",
               float16=112, float32=14, float64=7),
        _sheet("(NVIDIA |Tesla )?T4", "NVIDIA T4 data sheet", float16=65, float32=8.1),
        _sheet("NVIDIA GeForce RTX 5090", "NVIDIA RTX Blackwell architecture paper",
               bfloat16=209.5, tf32=104.8, float32=104.8),
        _sheet("NVIDIA GeForce RTX 4090", "NVIDIA Ada architecture paper",
               bfloat16=165.2, tf32=82.6, float32=82.6),
        _sheet("NVIDIA GeForce RTX 3090", "NVIDIA GA102 architecture paper",
               bfloat16=71, tf32=35.6, float32=35.6),
        _sheet("AMD Instinct MI300X", "AMD Instinct MI300X data sheet",
               bfloat16=1307.4, tf32=653.7, float32=163.4, float64=163.4),
    )  # fmt: skip


def _sheet(pattern: str, source: str, **tera: float) -> DataSheet:
    """Make one row; float16 has the rate of bfloat16 unless it is given."""
    assert tera.keys() <= set(get_args(Arithmetic)), f"{source}: {', '.join(tera)}"
    if "bfloat16" in tera:
        tera.setdefault("float16", tera["bfloat16"])
    return DataSheet(pattern=pattern, source=source, tera=cast("dict[Arithmetic, float]", tera))
