"""`phalanx bench mfu`: the share of a device's arithmetic that training a perceptron reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.bench.mlp import MlpRun, Recipe, measure_mlp
from phalanx.cli.bench.common import BenchConfig, document_of, folder_of, resolved, write
from phalanx.cli.screen import print_json
from phalanx.config.fields import Range
from phalanx.measure.utilization import percent


@dataclass(frozen=True, kw_only=True)
class MfuConfig(BenchConfig):
    """Measure MFU and HFU of a plain perceptron: forward, backward and optimizer."""

    layers: Annotated[int, Range(1)] = 8
    """Linear layers."""
    width: Annotated[int | None, Range(1)] = None
    """Rows and columns of each; the largest of 8192, 4096, ... for time and memory if unset."""
    compile: bool = False
    """Compile the perceptron with torch.compile."""
    recipe: Recipe = "plain"
    """lecture: float32 weights under autocast, biases, Adam, new inputs; plain stands beside it."""


def run(config: MfuConfig, console: Console) -> int:
    """Measure, and print a table and the formulas behind it."""
    device, arithmetic = resolved(config)
    folder = folder_of(config.out)
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
    for each in results:
        console.print(Text(f"{each.recipe}: {each.utilization.text()}"))
    document = document_of("mfu", result.as_dict())
    if results[1:]:
        document["beside"] = [each.as_dict() for each in results[1:]]
    if folder is not None:
        stem = f"mfu-{result.device}-{result.arithmetic}"
        stem += "" if result.recipe == "plain" else f"-{result.recipe}"
        stem += "-compiled" if result.is_compiled else ""
        write(folder / f"{stem}.json", document, console)
    if config.json:
        print_json(document)
    return 0


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
        ("rate", utilization.rate_text()),
    ]
    if utilization.peak is not None:
        rows.append(("MFU of data sheet", percent(utilization.mfu("data sheet"))))
    return [*rows, ("MFU of ceiling", percent(utilization.mfu("ceiling")))]
