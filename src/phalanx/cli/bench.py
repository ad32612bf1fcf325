"""`phalanx bench`: what this machine can do. Each verb prints a table, and keeps JSON if asked."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.screen import print_json, screen
from phalanx.config_load import read_command_line
from phalanx.errors import ConfigError, nearest
from phalanx.launch.local import num_cores
from phalanx.measure.ceiling import LARGEST_SIZE, Ceiling, checked_device, measure_ceiling
from phalanx.measure.environment import environment, has_fast_bfloat16
from phalanx.measure.logs import json_text
from phalanx.measure.mlp import MlpRun, Recipe, measure_mlp
from phalanx.measure.peaks import Arithmetic
from phalanx.measure.picture import draw_ceiling, has_matplotlib
from phalanx.measure.tensor import DEFAULT_LAYOUTS, DEFAULT_SIZES, LayoutPoint, measure_tensor
from phalanx.measure.tensor_theory import Amounts
from phalanx.measure.utilization import percent


@dataclass(frozen=True, kw_only=True)
class ResultConfig:
    """What every verb of bench takes."""

    threads: int | None = None
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
    budget_s: float = 60.0
    """Seconds to spend on measuring, about."""


@dataclass(frozen=True, kw_only=True)
class CeilingConfig(BenchConfig):
    """Measure the matmul ceiling: square products of doubling size, as a table and a picture."""

    max_size: int = LARGEST_SIZE
    """Largest size to try."""


@dataclass(frozen=True, kw_only=True)
class MfuConfig(BenchConfig):
    """Measure MFU and HFU of a plain perceptron: forward, backward and optimizer."""

    layers: int = 8
    """Linear layers."""
    width: int | None = None
    """Rows and columns of each; the largest of 8192, 4096, ... for time and memory if unset."""
    compile: bool = False
    """Compile the perceptron with torch.compile."""
    recipe: Recipe = "plain"
    """lecture: float32 weights under autocast, biases, Adam, new inputs; plain stands beside it."""


@dataclass(frozen=True, kw_only=True)
class TensorConfig(ResultConfig):
    """Measure one decoder block under layouts of tensor parallelism, on CPU ranks of this host."""

    layouts: tuple[str, ...] = DEFAULT_LAYOUTS
    """Strategies of tp alone."""
    sizes: tuple[str, ...] = DEFAULT_SIZES
    """Width of the block and its microbatch, each HIDDENxROWSxPLACES."""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Data type of the arithmetic; auto: bfloat16 where the CPU has it, else float32."""
    repeats: int = 5
    """Steps to time of each layout, which take turns; 0 only counts."""


_VERBS: Mapping[str, CeilingConfig | MfuConfig | TensorConfig] = {
    "ceiling": CeilingConfig(),
    "mfu": MfuConfig(),
    "tensor": TensorConfig(),
}


def run(argv: list[str]) -> int:
    """Run `phalanx bench` on its arguments and return the exit status.

    Raises:
        ConfigError: a setting is out of range, or this machine lacks what it asks for.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    verb, *words = argv
    if verb not in _VERBS:
        raise ConfigError(
            f"'{verb}' is nothing that bench measures{nearest(verb, _VERBS)}; it measures "
            f"{', '.join(_VERBS)}"
        )
    config = read_command_line(words, _VERBS[verb], prog=f"phalanx bench {verb}")
    if config.threads is not None:
        if config.threads < 1:
            raise ConfigError(f"threads is {config.threads}; it must be at least 1")
        torch.set_num_threads(config.threads)
    console = screen()
    if isinstance(config, TensorConfig):
        return _bench_tensor(config, console)
    if config.budget_s <= 0:
        raise ConfigError(f"budget_s is {config.budget_s}; it must be above 0")
    if isinstance(config, CeilingConfig):
        return _bench_ceiling(config, console)
    return _bench_mfu(config, console)


def _usage() -> str:
    lines = ["usage: phalanx bench VERB [OPTIONS]", ""]
    lines += [f"  {verb:<8} {type(config).__doc__}" for verb, config in _VERBS.items()]
    return "\n".join([*lines, "", "phalanx bench VERB --help lists a verb's options."])


def _bench_ceiling(config: CeilingConfig, console: Console) -> int:
    device, arithmetic = _resolved(config)
    folder = _folder(config.out)
    ceiling = measure_ceiling(device, arithmetic, config.max_size, config.budget_s)
    console.print(Text(f"Matrix products in {ceiling.arithmetic}, {ceiling.machine}"))
    console.print(_ceiling_table(ceiling))
    for size, reason in ceiling.skipped:
        console.print(Text(f"{size} skipped: {reason}"))
    _print_ceiling_text(ceiling, console)
    document = _document("ceiling", ceiling.as_dict())
    if folder is not None:
        stem = f"ceiling-{ceiling.device}-{ceiling.arithmetic}"
        _write(folder / f"{stem}.json", document, console)
        if has_matplotlib():
            draw_ceiling(ceiling, folder / f"{stem}.svg")
            console.print(Text(f"wrote {folder / f'{stem}.svg'}"), soft_wrap=True)
        else:
            # Text, since a console would read the brackets as markup.
            advice = "no picture: matplotlib is missing; pip install 'phalanx-train[plot]'"
            console.print(Text(advice))
    if config.json:
        print_json(document)
    return 0


def _bench_mfu(config: MfuConfig, console: Console) -> int:
    device, arithmetic = _resolved(config)
    folder = _folder(config.out)
    recipes: tuple[Recipe, ...] = ("plain",) if config.recipe == "plain" else ("lecture", "plain")
    results: list[MlpRun] = []
    for recipe in recipes:  # what stands beside the first is as wide
        results.append(
            measure_mlp(
                device,
                arithmetic,
                num_layers=config.layers,
                width=results[0].width if results else config.width,
                budget_s=config.budget_s / len(recipes),
                compile=config.compile,
                recipe=recipe,
            )
        )
    result = results[0]
    console.print(Text(f"MFU of a perceptron in {result.arithmetic}, {result.machine}"))
    console.print(_mfu_table(results))
    console.print(Text(f"{result.choice}"))
    for run in results:
        console.print(Text(f"{run.recipe}: {run.utilization.text()}"))
    document = _document("mfu", result.as_dict())
    if results[1:]:
        document["beside"] = [run.as_dict() for run in results[1:]]
    if folder is not None:
        stem = f"mfu-{result.device}-{result.arithmetic}"
        stem += "" if result.recipe == "plain" else f"-{result.recipe}"
        stem += "-compiled" if result.is_compiled else ""
        _write(folder / f"{stem}.json", document, console)
    if config.json:
        print_json(document)
    return 0


def _bench_tensor(config: TensorConfig, console: Console) -> int:
    folder = _folder(config.out)
    precision = config.dtype
    if precision == "auto":
        precision = "bfloat16" if has_fast_bfloat16("cpu") else "float32"
    result = measure_tensor(
        config.layouts,
        config.sizes,
        precision=precision,
        repeats=config.repeats,
        threads=config.threads,
    )
    for size, points in groupby(result.points, lambda point: point.size):
        words = (
            f"One block, hidden {size.hidden}, ffn {size.shape.ffn}, {size.num_rows} rows of "
            f"{size.length} places ({size.num_tokens} tokens), {precision}; a rank, a step"
        )
        console.print(Text(words))
        console.print(_tensor_table(list(points)))
    for crossing in result.crossings:
        words = (
            f"hidden {crossing.hidden}: {crossing.strategy} sends less than one dimension "
            f"from {crossing.num_tokens:,.0f} tokens a microbatch on"
        )
        console.print(Text(words))
    if config.repeats:
        words = (
            f"times are of {config.repeats} steps in turns on {num_cores()} cores; compare those "
            "of as many ranks. The theory of a time is its products with weights alone, at the "
            "rate that all ranks together reach."
        )
        console.print(Text(words))
    document = _document("tensor", result.as_dict())
    if folder is not None:
        _write(folder / f"tensor-cpu-{precision}.json", document, console)
    if config.json:
        print_json(document)
    return 0


def _resolved(config: BenchConfig) -> tuple[str, Arithmetic]:
    """Replace both `auto` by what this machine has."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.dtype != "auto":
        return device, config.dtype
    return device, "bfloat16" if has_fast_bfloat16(checked_device(device, "float32")) else "float32"


def _folder(out: str | None) -> Path | None:
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


def _document(benchmark: str, result: dict[str, object]) -> dict[str, object]:
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d"),
        **result,
        "environment": environment(),
    }


def _write(path: Path, document: dict[str, object], console: Console) -> None:
    try:
        path.write_text(json_text(document) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give another folder with --out"
        ) from None
    console.print(Text(f"wrote {path}"), soft_wrap=True)


def _ceiling_table(ceiling: Ceiling) -> Table:
    table = Table()
    table.add_column("n x n", justify="right")
    table.add_column("repeats", justify="right")
    table.add_column("median ms", justify="right")
    table.add_column("median TFLOP/s", justify="right")
    table.add_column("best TFLOP/s", justify="right")
    if ceiling.peak is not None:
        table.add_column("of data sheet", justify="right")
    for point in ceiling.points:
        row = [
            str(point.num_rows),
            str(point.repeats),
            f"{1e3 * point.median_s:.3f}",
            f"{point.median_flops_per_s / 1e12:.3f}",
            f"{point.best_flops_per_s / 1e12:.3f}",
        ]
        if ceiling.peak is not None:
            row.append(percent(point.best_flops_per_s / ceiling.peak.flops_per_s))
        table.add_row(*row)
    return table


def _print_ceiling_text(ceiling: Ceiling, console: Console) -> None:
    words = (
        f"ceiling {ceiling.flops_per_s / 1e12:.3f} TFLOP/s (fastest repeat), sustained "
        f"{ceiling.sustained_flops_per_s / 1e12:.3f} TFLOP/s (best median)"
    )
    if ceiling.peak is None:
        words += "; no data sheet is known for this device"
    else:
        words += f"; data sheet {ceiling.peak.flops_per_s / 1e12:.1f} ({ceiling.peak.source})"
    console.print(Text(words))


def _mfu_table(results: Sequence[MlpRun]) -> Table:
    table = Table(show_header=len(results) > 1)
    columns = [dict(_mfu_rows(result)) for result in results]
    table.add_column("recipe")
    for result in results:
        table.add_column(result.recipe, justify="right")
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _mfu_rows(result: MlpRun) -> list[tuple[str, str]]:
    utilization = result.utilization
    rows = [
        ("layers x width, rows", f"{result.num_layers} x {result.width}, {result.num_rows}"),
        ("compiled", "yes" if result.is_compiled else "no"),
        ("steps measured", str(result.num_steps)),
        ("step, median (best)", f"{utilization.time_s:.4g} s ({result.best_step_s:.4g} s)"),
        ("optimizer in it", percent(result.optimizer_s / utilization.time_s)),
        ("rate", f"{utilization.causal.model / utilization.time_s / 1e12:.3f} TFLOP/s"),
    ]
    if utilization.peak is not None:
        rows.append(("MFU of data sheet", percent(utilization.mfu("data sheet"))))
    return [*rows, ("MFU of ceiling", percent(utilization.mfu("ceiling")))]


def _tensor_table(points: Sequence[LayoutPoint]) -> Table:
    table = Table()
    table.add_column("layout")
    table.add_column("")
    for heading in ("sent MiB", "calls", "weights MiB", "kept MiB", "peak MiB", "ms"):
        table.add_column(heading, justify="right")
    table.add_column("min - max", justify="right")
    for point in points:
        times_ms = [1e3 * time_s for time_s in point.times_s]
        table.add_row(
            point.strategy,
            "measured",
            *_amounts_cells(point.measured),
            f"{point.peak_bytes / 2**20:.2f}",
            _ms(statistics.median(times_ms)) if times_ms else "-",
            f"{_ms(min(times_ms))} - {_ms(max(times_ms))}" if times_ms else "-",
        )
        products_ms = "-" if point.products_s is None else _ms(1e3 * point.products_s)
        table.add_row(
            "", "theory", *_amounts_cells(point.theory), "-", products_ms, "", end_section=True
        )
    return table


def _ms(time_ms: float) -> str:
    return f"{time_ms:.1f}" if time_ms < 100 else f"{time_ms:.0f}"


def _amounts_cells(amounts: Amounts) -> list[str]:
    return [
        f"{amounts.sent_bytes / 2**20:.2f}",
        str(amounts.num_calls),
        f"{amounts.weight_bytes / 2**20:.2f}",
        f"{amounts.kept_bytes / 2**20:.2f}",
    ]
