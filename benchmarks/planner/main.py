"""How far the planner's prices are from measured runs, by who has published them.

    python benchmarks/planner/main.py RUNS.jsonl [--all] [--json FILE]

RUNS.jsonl has one run a line; the fields are those of `phalanx predict`. Without --all, of the runs
that name a core the core is taken. Beside the error of the planner stands the error of a constant:
the median MFU of the group itself, which no run but those of the group can know. `left out` prices
each group as if its program had never been seen: with the median of the constants of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from phalanx.errors import PhalanxError
from phalanx.planner import published
from phalanx.planner.software import typical


class Priced(NamedTuple):
    """A run: what was measured and predicted, in seconds; and its cell of equal work."""

    group: str
    cell: tuple[Any, ...]
    measured_s: float
    predicted_s: float
    alone_s: float
    peak_s: float
    measured_gb: float | None
    held_gb: float
    fits: bool


def priced(row: dict[str, Any]) -> Priced | None:
    """Price a run; None where nothing was measured.

    Raises:
        PhalanxError: the planner cannot read it.
    """
    run = published.read(row)
    shape = run.planned.shape
    if (step_s := published.measured_s(row, shape)) is None:
        return None
    of_others = typical(without=run.software.name)
    of_others = dataclasses.replace(of_others, speed_up=run.software.speed_up)
    unknown = dataclasses.replace(run, software=of_others)
    gigabytes, fits = published.held(run)
    tokens = row["global_batch_seqs"] * row["seq_len"]
    peak = run.cluster.device.flops * row["num_gpus"]
    return Priced(
        group=row["group"],
        cell=(row["group"], row["model"]["name"], row["num_gpus"], row["seq_len"]),
        measured_s=step_s,
        predicted_s=published.seconds(run),
        alone_s=published.seconds(unknown),
        peak_s=published.flops_of_token(shape, row["seq_len"]) * tokens / peak,
        measured_gb=row["measured"].get("memory_gb"),
        held_gb=gigabytes / 1e9,
        fits=fits,
    )


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
    groups: dict[str, list[Priced]] = defaultdict(list)
    cells: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    failed = 0
    for number, row in enumerate(rows, 1):
        print(f"\r{number} of {len(rows)}", end="", file=sys.stderr, flush=True)
        try:
            run = priced(row)
        except PhalanxError:
            failed += 1
            continue
        if run is not None:
            groups[run.group].append(run)
            cells[run.cell].append((run.measured_s, run.predicted_s))
    print(file=sys.stderr)
    table = {name: row_of(runs) for name, runs in groups.items()}
    table["all"] = row_of([run for runs in groups.values() for run in runs])
    print(f"{'group':<22}" + "".join(f"{name:>13}" for name in table["all"]))
    for name, figures in table.items():
        cells_of = [f"{v:>13.0f}" if k == "runs" else f"{v:>13.1%}" for k, v in figures.items()]
        print(f"{name:<22}" + "".join(cells_of))
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
