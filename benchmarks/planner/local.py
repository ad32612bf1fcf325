"""Planned beside measured: strategies of a small model, run for real on this machine.

    python benchmarks/planner/local.py RESULTS.jsonl [--rounds R] [--seconds S] [NAME ...]

Each run takes some steps of one global batch, and measures after its first step the rates that its
prediction is of: its cache folder is new, so that no run takes the rates of another hour. The runs
of a round follow one another, and rounds repeat them. A name is one of `RUNS`, or a strategy.
RESULTS.jsonl keeps a line for each run; a further call continues where `--seconds` ended one.
Bytes are those of the strategy's collectives on rank 0, without those of `_UNPLANNED`.
Activations, casts of weights and buffers of collectives count together: one run of a block on the
meta device shows them together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from phalanx.account.planned import decoder_step
from phalanx.models.registry import shape_of
from phalanx.strategy import Strategy

DEEP: Final = "--shape.num-layers 6 --batch.global-size 16 --steps 8"
RUNS: Final = {
    "phalanx train": "--strategy dp2 --steps 20",  # the README's first command, fewer steps
    **{
        name: f"--strategy {name} {DEEP}"
        for name in (
            *("dp2", "dp2:naive", "fsdp2", "fsdp2:zero2", "fsdp2:zero1", "tp2", "cp2"),
            *("cp2:ulysses", "pp2", "pp2:gpipe", "dp2,recompute:full"),
        )
    },
    "dp2, accumulation 2": f"--strategy dp2 {DEEP} --batch.accumulation 2",
}
"""Name of a run -> its options: twelve strategies of a decoder of 6 blocks, after the README's."""

_UNPLANNED: Final = ("count", "clip", "metrics", "sizes")
"""Phases whose collectives are of a few numbers that the loop needs, or headers of new shapes."""


def run(words: str, folder: Path) -> dict[str, Any]:
    """Return the predicted and measured values of a run, and whether its bytes are as planned."""
    command = [sys.executable, "-m", "phalanx", "train", *words.split(), "--prompt", "a"]
    command += ["--model", "demo", "--eval-samples", "4", "--corpus.cache", str(folder / "data")]
    with tempfile.TemporaryDirectory() as out:
        said = subprocess.run(
            [*command, "--json", "--out", f"{out}/run"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "XDG_CACHE_HOME": out},
        )
        lines = map(json.loads, (Path(out) / "run" / "metrics.jsonl").read_text().splitlines())
        settings = next(line for line in lines if line["kind"] == "config")
    summary = json.loads(said.stdout.splitlines()[-1])
    return {**summary["predicted"], "sent": sent(summary["sent"]), "planned": planned(settings)}


def sent(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes that rank 0 sends in a step: phase, axis and collective -> bytes."""
    kept = [entry for entry in entries if entry["phase"] not in _UNPLANNED]
    return {f"{of['phase']} {of['axis']} {of['op']}": of["sent_bytes"] for of in kept}


def planned(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the planned bytes of a step with a run's settings, as `sent` does."""
    changed = {name: value for name, value in settings["shape"].items() if value is not None}
    batch, length = settings["batch"], settings["corpus"]["seq_len"]
    shape = dataclasses.replace(shape_of("demo"), **changed)
    strategy = Strategy.parse(settings["strategy"])
    sizes = [(batch["microbatch"], length)] * batch["accumulation"]
    step = decoder_step(
        shape, strategy, length, batch["microbatch"], batch["accumulation"], settings["precision"]
    )
    return sent([dataclasses.asdict(entry) for entry in step.plan.traffic(sizes)])


def spread(values: Sequence[float]) -> str:
    """Return the median of errors, and of several the least and the most."""
    text = f"{statistics.median(values):+.0%}"
    return text if len(values) == 1 else f"{text} ({min(values):+.0%} to {max(values):+.0%})"


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of pairs without ties."""
    ranks = [sorted(values).index(each) for values in zip(*pairs, strict=True) for each in values]
    num = len(pairs)
    apart = sum((a - b) ** 2 for a, b in zip(ranks[:num], ranks[num:], strict=True))
    return 1 - 6 * apart / (num * (num**2 - 1))


def row(name: str, runs: Sequence[dict[str, Any]]) -> tuple[str, tuple[float, float]]:
    """Return a row of the table, and the medians of the predicted and of the measured seconds."""
    steps = [of["time_s"]["step"] for of in runs]
    medians = [statistics.median(of[which] for of in steps) for which in ("predicted", "measured")]
    times = " | ".join(f"{1e3 * median:,.0f}" for median in medians)
    errors = spread([of["predicted"] / of["measured"] - 1 for of in steps])
    is_equal = all(of["sent"] == of["planned"] for of in runs)
    num_bytes = sum(runs[0]["sent"].values()) / 2**20
    last = runs[-1]["bytes"]
    peak = last.pop("peak")
    # `passing` is cast and activations together; a kind below a MiB is no cause of a peak.
    kinds = {of: both for of, both in last.items() if of not in ("cast", "activations")}
    each = {
        of: v["predicted"] / v["measured"] - 1 for of, v in kinds.items() if v["measured"] >> 20
    }
    worst = max(each, key=lambda kind: abs(each[kind]))
    held = f"{peak['predicted'] / peak['measured'] - 1:+.1%} | {worst} {each[worst]:+.1%}"
    equal = "equal" if is_equal else "NOT EQUAL"
    return f"| {name} | {times} | {errors} | {num_bytes:,.1f} | {equal} | {held} |", (
        medians[0],
        medians[1],
    )


def main() -> None:
    """Run what is not done, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("names", nargs="*", default=[*RUNS])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    begun_s = time.perf_counter()
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    done: dict[tuple[str, int], dict[str, Any]] = {
        (name, number): values for name, number, values in map(json.loads, lines)
    }
    for number in range(args.rounds):
        for name in args.names:
            if (name, number) in done or time.perf_counter() - begun_s > args.seconds:
                continue
            words = RUNS.get(name, f"--strategy {name} {DEEP}")
            done[name, number] = run(words, args.results.parent)
            with args.results.open("a") as file:
                file.write(json.dumps([name, number, done[name, number]]) + "\n")
    print(
        "| strategy | predicted, ms | measured, ms | error | MiB sent | as planned | peak | worst |"
    )
    print("|---|---:|---:|---:|---:|---|---:|---|")
    times: list[tuple[float, float]] = []
    for name in dict.fromkeys(name for name, _ in done):
        text, both = row(name, [values for (of, _), values in done.items() if of == name])
        print(text)
        times.append(both)
    if len(times) > 1:
        print(f"\nSpearman {spearman(times):.2f} over {len(times)} runs")


if __name__ == "__main__":
    main()
