"""Predicted beside measured: strategies of a small model, run for real on this machine.

    phalanx bench ceiling --write this; phalanx bench comm --write this
    python benchmarks/planner/local.py RESULTS.jsonl [--seconds S] [STRATEGY ...]

Each strategy takes some steps of one global batch, and its summary has what the planner predicted.
RESULTS.jsonl keeps a line for each that is done, and a further call continues after `--seconds`.
Activations, casts of weights and buffers of collectives count together: one run of a block on the
meta device shows them together.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

STRATEGIES: Final = (
    *("dp2", "dp4", "dp8", "fsdp2", "fsdp4", "fsdp8", "fsdp4:zero1", "dp2,fsdp2"),
    *("tp2", "tp4", "tp4:2d", "dp2,tp2", "fsdp2,tp2", "cp2", "cp4"),
    *("pp2", "pp4", "pp2,dp2", "pp2,tp2", "pp2:interleaved/2", "dp2,recompute:full"),
)
MODEL: Final = "--model demo --shape.num-layers 6 --corpus.seq-len 256 --batch.global-size 16"
NUM_STEPS: Final = 8


def run(strategy: str) -> dict[str, Any]:
    """Return the summary of a run."""
    out = tempfile.mkdtemp()
    words = f"train --strategy {strategy} {MODEL} --steps {NUM_STEPS} --eval-samples 4 --prompt a"
    command = [sys.executable, "-m", "phalanx", *words.split(), "--json", "--out", f"{out}/run"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(out)
    return json.loads(said.stdout.splitlines()[-1])


def by_cause(summary: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return predicted and measured bytes by cause, for causes that hold a MiB."""
    found = {name: (of["predicted"], of["measured"]) for name, of in summary["bytes"].items()}
    del found["cast"], found["activations"]  # `passing` has both, and what collectives pass
    return {name: both for name, both in found.items() if both[1] >= 1 << 20}


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of pairs without ties."""
    ranks = [sorted(values).index(each) for values in zip(*pairs, strict=True) for each in values]
    num = len(pairs)
    apart = sum((a - b) ** 2 for a, b in zip(ranks[:num], ranks[num:], strict=True))
    return 1 - 6 * apart / (num * (num**2 - 1))


def main() -> None:
    """Run what is not done, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    begun_s = time.perf_counter()
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    done: dict[str, dict[str, Any]] = dict(json.loads(line) for line in lines)
    for strategy in args.strategies:
        if strategy in done or time.perf_counter() - begun_s > args.seconds:
            continue
        done[strategy] = run(strategy)["predicted"]
        with args.results.open("a") as file:
            file.write(json.dumps([strategy, done[strategy]]) + "\n")
    print("| strategy | predicted, ms | measured, ms | error | peak | furthest cause |")
    print("|---|---:|---:|---:|---:|---|")
    times: list[tuple[float, float]] = []
    for strategy, of in done.items():
        step = of["time_s"]["step"]
        times.append((step["predicted"], step["measured"]))
        errors = {name: p / m - 1 for name, (p, m) in by_cause(of).items()}
        peak = errors.pop("peak")
        name = max(errors, key=lambda cause: abs(errors[cause]))
        print(
            f"| {strategy} | {1e3 * step['predicted']:,.0f} | {1e3 * step['measured']:,.0f} | "
            f"{step['predicted'] / step['measured'] - 1:+.0%} | {peak:+.1%} | "
            f"{name} {errors[name]:+.1%} |"
        )
    print(f"\nSpearman {spearman(times):.2f} over {len(times)} strategies")


if __name__ == "__main__":
    main()
