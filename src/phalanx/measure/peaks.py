"""Peak FLOP/s of devices from vendor data sheets: dense products, without sparsity.

A device counts as unknown unless its full name matches, because a MIG slice, a laptop GPU of the
same name and every CPU have other peaks, and a guess would make every MFU wrong. The float16 and
bfloat16 rates are with float32 accumulation, which torch uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GOOD, EXCELLENT = 0.30, 0.40
"""Thresholds above which the MFU of a GPU, relative to its data sheet, has these grades."""

NO_GRADE = (
    f"No grade: grades are for the data sheets of GPUs, above {100 * GOOD:.0f} % good and above "
    f"{100 * EXCELLENT:.0f} % excellent."
)

Arithmetic = Literal["bfloat16", "float16", "tf32", "float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak rate of a device for one data type."""

    flops_per_s: float
    source: str
    """Document that states the rate."""


class DataSheet:
    """Peaks of one device in TFLOP/s, as its vendor publishes them.

    `pattern` is a regular expression for the full device name that the driver reports.
    """

    def __init__(self, pattern: str, source: str, **tera: float) -> None:
        self.pattern, self.source, self.tera = pattern, source, tera

    def peaks(self) -> dict[str, float]:
        """Return FLOP/s by data type; float16 equals bfloat16 unless it is listed."""
        tera = self.tera
        if "bfloat16" in tera:
            tera = {"float16": tera["bfloat16"], **tera}
        return {arithmetic: 1e12 * rate for arithmetic, rate in tera.items()}


def grade_of(mfu: float) -> str:
    """Return the grade of an MFU relative to the data sheet, with its thresholds and source."""
    word = "excellent" if mfu > EXCELLENT else "good" if mfu > GOOD else "can be better"
    return (
        f"{word}: on GPUs above {100 * GOOD:.0f} % is good and above {100 * EXCELLENT:.0f} % "
        "excellent; a rule of thumb; arXiv 2204.02311 (PaLM) compares the MFU of published models"
    )


def peak_of(name: str, arithmetic: Arithmetic) -> Peak | None:
    """Return the data-sheet peak of a device that the driver calls `name`; None if it is unknown.

    `tf32` is float32 data on tensor cores.
    """
    if (sheet := sheet_of(name)) is None or arithmetic not in (peaks := sheet.peaks()):
        return None
    return Peak(flops_per_s=peaks[arithmetic], source=sheet.source)


def sheet_of(name: str) -> DataSheet | None:
    """Return the data sheet of a device that the driver calls `name`; None if it is unknown."""
    for sheet in DATA_SHEETS:
        if re.fullmatch(sheet.pattern, name, flags=re.IGNORECASE):
            return sheet
    return None


_HOPPER = {"bfloat16": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 66.9, "fp8": 1978.9}
_BLACKWELL = {"bfloat16": 2250, "tf32": 1125, "float32": 75, "fp8": 4500}
_GRACE_BLACKWELL = {"bfloat16": 2500, "tf32": 1250, "float32": 80, "fp8": 5000}
_HOPPER_NVL = {"bfloat16": 835.5, "tf32": 417.5, "float32": 60, "float64": 60}
_CDNA3 = {"bfloat16": 1307.4, "tf32": 653.7, "float32": 163.4, "float64": 163.4, "fp8": 2614.9}
DATA_SHEETS = (
    DataSheet("NVIDIA GB300", "NVIDIA GB300 NVL72 data sheet", **_GRACE_BLACKWELL),
    DataSheet("NVIDIA B300( SXM6 AC)?", "NVIDIA HGX B300 data sheet", **_BLACKWELL),
    DataSheet("NVIDIA GB200", "NVIDIA GB200 NVL72 data sheet", **_GRACE_BLACKWELL),
    DataSheet("NVIDIA B200", "NVIDIA HGX B200 data sheet", **_BLACKWELL),
    DataSheet("NVIDIA H200", "NVIDIA H200 SXM data sheet", **_HOPPER),
    DataSheet("NVIDIA H200 NVL", "NVIDIA H200 NVL data sheet", **_HOPPER_NVL),
    DataSheet("NVIDIA GH200 (480GB|144G HBM3e)", "NVIDIA GH200 data sheet", **_HOPPER),
    DataSheet("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5, H100 architecture paper", **_HOPPER),
    DataSheet("NVIDIA H100 NVL", "NVIDIA H100 NVL data sheet", **_HOPPER_NVL),
    DataSheet("NVIDIA H100 PCIe", "NVIDIA H100 PCIe data sheet",
              bfloat16=756, tf32=378, float32=51, float64=51),
    DataSheet("(NVIDIA )?A100(-SXM4-(40|80)GB|-PCIE-40GB| 80GB PCIe)", "NVIDIA A100 data sheet",
              bfloat16=312, tf32=156, float32=19.5, float64=19.5),
    DataSheet("(NVIDIA )?A40", "NVIDIA A40 data sheet", bfloat16=149.7, tf32=74.8, float32=37.4),
    DataSheet("(NVIDIA )?A30", "NVIDIA A30 data sheet", bfloat16=165, tf32=82, float32=10.3),
    DataSheet("(NVIDIA )?A10", "NVIDIA A10 data sheet", bfloat16=125, tf32=62.5, float32=31.2),
    DataSheet("NVIDIA L40S", "NVIDIA L40S data sheet", bfloat16=362.05, tf32=183, float32=91.6),
    DataSheet("NVIDIA L4", "NVIDIA L4 data sheet", bfloat16=121, tf32=60, float32=30.3),
    DataSheet("(Tesla )?V100-SXM[23]-(16|32)GB(-LS)?", "NVIDIA V100 SXM2 data sheet",
              float16=125, float32=15.7, float64=7.8),
    DataSheet("(Tesla )?V100-PCIE-(16|32)GB", "NVIDIA V100 PCIe data sheet",
              float16=112, float32=14, float64=7),
    DataSheet("(NVIDIA |Tesla )?T4", "NVIDIA T4 data sheet", float16=65, float32=8.1),
    DataSheet("NVIDIA GeForce RTX 5090", "NVIDIA RTX Blackwell architecture paper",
              bfloat16=209.5, tf32=104.8, float32=104.8),
    DataSheet("NVIDIA GeForce RTX 4090", "NVIDIA Ada architecture paper",
              bfloat16=165.2, tf32=82.6, float32=82.6),
    DataSheet("NVIDIA GeForce RTX 3090", "NVIDIA GA102 architecture paper",
              bfloat16=71, tf32=35.6, float32=35.6),
    DataSheet("AMD Instinct MI355X", "AMD Instinct MI355X data sheet",
              bfloat16=2516.6, float32=157.3, float64=78.6, fp8=5033.2),
    DataSheet("AMD Instinct MI325X", "AMD Instinct MI325X data sheet", **_CDNA3),
    DataSheet("AMD Instinct MI300X", "AMD Instinct MI300X data sheet", **_CDNA3),
)  # fmt: skip
"""Known devices: NVIDIA data center GPUs newest first, NVIDIA consumer GPUs, then AMD."""
