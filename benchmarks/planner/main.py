"""How far the planner's prices are from measured runs, by who has published them.

    python benchmarks/planner/main.py RUNS.jsonl [--all] [--json FILE]

RUNS.jsonl has one run a line, with the fields that predict.py reads. Without --all, of the runs
that name a core the core is taken. Beside the error of the planner stands the error of a constant:
the median MFU of the group itself, which no run but those of the group can know. `left out` prices
each group as if nobody had published it: with the median of the constants of the other programs,
and with the speed of its device at which the other groups on that device have the least error; of a
device on which no other ran, as the catalogue assumes of unknown ones. Runs whose strategy Phalanx
has not are priced by the nearest, in groups of their own that do not count among all.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
import published
from phalanx.errors import PhalanxError
from phalanx.planner.software import DEFAULT, Software, on_device, typical
from published import PublishedRun

SCALES: Final = (0.8, 0.87, 0.93, 1.0, 1.07, 1.15, 1.25)
"""Speeds of a device beside its constants, of which the one with the least error is taken."""


@dataclass
class Measured:
    """A run, its group, the seconds of its step, and its cell of equal work."""

    run: PublishedRun
    group: str
    cell: tuple[Any, ...]
    step_s: float
    peak_s: float
    memory_gb: float | None

    @property
    def on(self) -> tuple[float, float]:
        """The constants of the device, by which devices of a family are alike."""
        return on_device(DEFAULT, self.run.cluster.device)

    @functools.cached_property
    def errors(self) -> list[float]:
        """The errors with the speeds of `SCALES`."""
        return [error(self.predicted_s(scale=scale), self.step_s) for scale in SCALES]

    def predicted_s(self, program: Software | None = None, scale: float = 1.0) -> float:
        """Return the predicted seconds, of another program or on a faster device if given."""
        of = program or self.run.software
        products, attention = scale * of.products, scale * of.attention
        of = dataclasses.replace(of, products=products, attention=attention)
        of = dataclasses.replace(of, speed_up=self.run.software.speed_up)
        return published.seconds(dataclasses.replace(self.run, software=of))


class Priced(NamedTuple):
    """What was measured and predicted of a run, in seconds and bytes."""

    measured_s: float
    predicted_s: float
    alone_s: float
    peak_s: float
    measured_gb: float | None
    held_gb: float
    fits: bool


def measured(row: dict[str, Any]) -> Measured | None:
    """Read a run; None where nothing was measured.

    Raises:
        PhalanxError: the planner cannot read it.
    """
    run = published.read(row)
    shape = run.planned.model.shape
    if (step_s := published.measured_s(row, shape)) is None:
        return None
    tokens = row["global_batch_seqs"] * row["seq_len"]
    peak = run.cluster.device.flops * row["num_gpus"]
    return Measured(
        run=run,
        group=f"{row['group']}, nearest" if run.lacks else row["group"],
        cell=(row["group"], row["model"]["name"], row["num_gpus"], row["seq_len"]),
        step_s=step_s,
        peak_s=published.flops_of_token(shape, row["seq_len"]) * tokens / peak,
        memory_gb=row["measured"].get("memory_gb"),
    )


def priced(of: Measured, others: list[Measured]) -> Priced:
    """Price a run: with all that is known, and with what the runs of `others` alone say."""
    gigabytes, fits = published.held(of.run)
    return Priced(
        measured_s=of.step_s,
        predicted_s=of.predicted_s(),
        alone_s=of.predicted_s(typical(without=of.run.software.name), _scale(of, others)),
        peak_s=of.peak_s,
        measured_gb=of.memory_gb,
        held_gb=gigabytes / 1e9,
        fits=fits,
    )


def _scale(of: Measured, others: list[Measured]) -> float:
    """Return the speed of a run's device beside its constants, by others' runs on its like."""
    same = [each.errors for each in others if each.on == of.on]
    if not same:
        return 0.8 * of.run.cluster.device.matmul_efficiency / of.on[0]
    means = [statistics.mean(column) for column in zip(*same, strict=True)]
    return SCALES[means.index(min(means))]


def error(predicted: float, measured: float) -> float:
    """Return how far a prediction is off, as a part of the measurement."""
    return abs(predicted / measured - 1)


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Return Spearman's correlation of pairs."""
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    return statistics.correlation(*ranks) if len(set(ranks[1])) > 1 else 1.0


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def row_of(runs: list[Priced]) -> dict[str, float]:
    """Return the figures of a group."""
    mfu = statistics.median(run.peak_s / run.measured_s for run in runs)
    held = [error(run.held_gb, run.measured_gb) for run in runs if run.measured_gb]
    return {
        "runs": len(runs),
        "error": statistics.mean(error(r.predicted_s, r.measured_s) for r in runs),
        "median error": statistics.median(error(r.predicted_s, r.measured_s) for r in runs),
        "constant": statistics.mean(error(r.peak_s / mfu, r.measured_s) for r in runs),
        "left out": statistics.mean(error(r.alone_s, r.measured_s) for r in runs),
        "memory": statistics.mean(held) if held else float("nan"),
        "unfit": sum(not r.fits for r in runs) / len(runs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--all", action="store_true", help="runs beyond the core too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.runs.read_text(encoding="utf-8").splitlines()]
    rows = [r for r in rows if "timing" in r["usable_for"] and (args.all or r.get("core"))]
    runs: list[Measured] = []
    failed = 0
    for row in rows:
        try:
            run = measured(row)
        except PhalanxError:
            failed += 1
            continue
        runs += [] if run is None else [run]
    groups: dict[str, list[Priced]] = defaultdict(list)
    cells: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for number, run in enumerate(runs, 1):
        print(f"\r{number} of {len(runs)}", end="", file=sys.stderr, flush=True)
        of = priced(run, [each for each in runs if each.group != run.group])
        groups[run.group].append(of)
        cells[run.cell].append((of.measured_s, of.predicted_s))
    print(file=sys.stderr)
    table = {name: row_of(runs) for name, runs in groups.items()}
    counted = [runs for name, runs in groups.items() if not name.endswith(", nearest")]
    table["all"] = row_of([run for runs in counted for run in runs])
    print(f"{'group':<27}" + "".join(f"{name:>13}" for name in table["all"]))
    for name, figures in table.items():
        cells_of = [f"{v:>13.0f}" if k == "runs" else f"{v:>13.1%}" for k, v in figures.items()]
        print(f"{name:<27}" + "".join(cells_of))
    several = [pairs for pairs in cells.values() if len(pairs) > 3]
    if several:
        middle = statistics.median(map(rank_correlation, several))
        print(f"Spearman over {len(several)} cells of 4 layouts or more: median {middle:.2f}")
    print(f"{failed} runs could not be read")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
