"""Settings and results that the verbs of `phalanx bench` share.

A verb is a module with a dataclass of settings and a function `run(config, say) -> BenchResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from phalanx.config import ShapeConfig
from phalanx.config.fields import THREADS, Range
from phalanx.measure.environment import device_name, has_fast_bfloat16
from phalanx.measure.peaks import Arithmetic, Peak, peak_of
from phalanx.measure.products import checked_device
from phalanx.report.tabular import Part


@dataclass(frozen=True, kw_only=True)
class ResultConfig:
    """Settings of every bench verb."""

    threads: Annotated[int | None, THREADS] = None
    """CPU threads; torch's own choice if unset, or the cores shared evenly by several ranks."""
    out: str | None = None
    """Folder for the results; nothing is written if unset."""
    json: bool = False
    """Print the result as one JSON document on the last line."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(ResultConfig):
    """Settings of the verbs that measure one device."""

    device: str = "auto"
    """cpu, cuda or cuda:INDEX; auto: the first GPU, else the CPU."""
    dtype: Literal["auto", "bfloat16", "float16", "tf32", "float32", "float64"] = "auto"
    """Data type of the products; auto: bfloat16 where the device has it, else float32."""
    budget_s: Annotated[float, Range(0, ends="()")] = 60.0
    """Seconds to spend on measuring, about."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ResultConfig):
    """Settings of the verbs that run a decoder."""

    threads: Annotated[int | None, THREADS] = None
    """CPU threads of each rank, whatever their number is; 1 if unset."""
    model: str = "demo"
    """Preset of the model's shape."""
    seq_len: Annotated[int, Range(1, 2**20, "[]")] = 256
    """Tokens of a sequence."""
    precision: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Data type of the arithmetic; auto: bfloat16 where the device has it, else float32."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes that replace the preset's."""


PrintLine = Callable[[str], None]
"""Function that prints a line while a verb measures."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The result of a verb.

    Attributes:
        name: name of the result files, without suffix.
        shown: texts and tables that the console prints, in this order.
        values: plain values for JSON.
        draw: function that draws the result into a file; None if there is no picture.
        files: suffix of each further result file -> function that writes the file.
        is_shown: whether this process prints and writes the result; under torchrun, only rank 0.
        exit_code: 1 if the work was measured and found wrong.
    """

    name: str
    shown: Sequence[Part]
    values: dict[str, Any]
    draw: Callable[[Path], None] | None = None
    files: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)
    is_shown: bool = True
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A measurement on one device in one data type."""

    device: str
    device_name: str
    arithmetic: Arithmetic
    num_threads: int | None
    """CPU threads; None on a GPU."""

    @property
    def machine(self) -> str:
        """Name of the device, with the number of threads on a CPU."""
        if self.num_threads is None:
            return self.device_name
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{self.device_name}, {threads}"

    @property
    def peak(self) -> Peak | None:
        """Peak of the GPU by its data sheet; None on a CPU, or if the table lacks the device."""
        return peak_of(self.device_name, self.arithmetic) if self.device == "cuda" else None


def device_fields(device: torch.device, arithmetic: Arithmetic) -> dict[str, Any]:
    """Return the fields of `OnDevice` for a device of this machine."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "arithmetic": arithmetic,
        "num_threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def resolve_device(config: DeviceConfig) -> tuple[torch.device, Arithmetic]:
    """Set the threads; return device and data type, with `auto` resolved for this machine."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    name, arithmetic = config.device, config.dtype
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = checked_device(name, "float32" if arithmetic == "auto" else arithmetic)
    if arithmetic == "auto":
        arithmetic = "bfloat16" if has_fast_bfloat16(device) else "float32"
    return device, arithmetic
