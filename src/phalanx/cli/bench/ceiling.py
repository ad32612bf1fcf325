"""`phalanx bench ceiling`: the rate of matrix products on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.bench.ceiling import LARGEST_SIZE, SMALLEST_SIZE, Ceiling, measure_ceiling
from phalanx.bench.picture import draw_ceiling, has_matplotlib
from phalanx.cli.bench.common import BenchConfig, document_of, folder_of, resolved, write
from phalanx.cli.screen import print_json
from phalanx.config.fields import Range
from phalanx.measure.utilization import percent


@dataclass(frozen=True, kw_only=True)
class CeilingConfig(BenchConfig):
    """Measure the matmul ceiling: square products of doubling size, as a table and a picture."""

    max_size: Annotated[int, Range(SMALLEST_SIZE)] = LARGEST_SIZE
    """Largest size to try."""


def run(config: CeilingConfig, console: Console) -> int:
    """Measure, print a table and draw a picture."""
    device, arithmetic = resolved(config)
    folder = folder_of(config.out)
    ceiling = measure_ceiling(device, arithmetic, config.max_size, config.budget_s)
    console.print(Text(f"Matrix products in {ceiling.arithmetic}, {ceiling.machine}"))
    console.print(_ceiling_table(ceiling))
    for size, reason in ceiling.skipped:
        console.print(Text(f"{size} skipped: {reason}"))
    _print_ceiling_text(ceiling, console)
    document = document_of("ceiling", ceiling.as_dict())
    if folder is not None:
        stem = f"ceiling-{ceiling.device}-{ceiling.arithmetic}"
        write(folder / f"{stem}.json", document, console)
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
    if ceiling.peak is not None and ceiling.flops_per_s > ceiling.peak.flops_per_s:
        words = "no share above 100 % of a data sheet is given: it is not that of this device"
        console.print(Text(words))
