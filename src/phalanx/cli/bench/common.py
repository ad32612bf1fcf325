"""What the verbs of bench share: their settings, and how a result is kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from rich.console import Console
from rich.text import Text

from phalanx.bench.ceiling import checked_device
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.measure.environment import environment, has_fast_bfloat16
from phalanx.measure.logs import json_text
from phalanx.measure.peaks import Arithmetic


@dataclass(frozen=True, kw_only=True)
class ResultConfig:
    """What every verb of bench takes."""

    threads: Annotated[int | None, Range(1)] = None
    """CPU threads; torch's own choice if unset, or the cores shared evenly by several ranks."""
    out: str | None = None
    """Folder for the results; nothing is written if unset."""
    json: bool = False
    """Print the result as one JSON document on the last line."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ResultConfig):
    """What the verbs of one device take."""

    device: str = "auto"
    """cpu, cuda or cuda:INDEX; auto: the first GPU, else the CPU."""
    dtype: Literal["auto", "bfloat16", "float16", "tf32", "float32", "float64"] = "auto"
    """Data type of the products; auto: bfloat16 where the device has it, else float32."""
    budget_s: Annotated[float, Range(0, ends="()")] = 60.0
    """Seconds to spend on measuring, about."""


def use_threads(threads: int | None) -> None:
    """Compute on this many threads; on torch's own choice if None."""
    if threads is not None:
        torch.set_num_threads(threads)


def resolved(config: BenchConfig) -> tuple[str, Arithmetic]:
    """Return device and data type, with each `auto` replaced by what this machine has.

    Raises:
        ConfigError: this machine lacks what a setting asks for.
    """
    use_threads(config.threads)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.dtype != "auto":
        return device, config.dtype
    return device, "bfloat16" if has_fast_bfloat16(checked_device(device, "float32")) else "float32"


def folder_of(out: str | None) -> Path | None:
    """Make the folder before anything is measured, so that a bad one costs no time."""
    if out is None:
        return None
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {out}: {error.strerror}; give another with --out"
        ) from None
    return Path(out)


def document_of(benchmark: str, result: dict[str, object]) -> dict[str, object]:
    """Return what is kept of a result: what was measured, when and on what."""
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d"),
        **result,
        "environment": environment(),
    }


def write(path: Path, document: dict[str, object], console: Console) -> None:
    """Write a result as a file, and say so.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(json_text(document) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give another folder with --out"
        ) from None
    console.print(Text(f"wrote {path}"), soft_wrap=True)
