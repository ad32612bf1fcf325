"""Time two source trees beside each other: seconds of a step, and until the first step has ended.

    python benchmarks/identity/speed.py TREE results/FILE.json --rounds 5

Rounds take turns of TREE and this tree: `phalanx train` on text under dp2, fsdp2, tp2 and pp2, and
a loop of one's own (102 Linear layers) under dp2 and fsdp2. A ratio above 1: this tree is faster.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS, WARMUP = 40, 10
SIZES = (
    "--shape.num-layers=4", "--shape.hidden=256", "--shape.num-heads=8", "--shape.num-kv-heads=8",
    "--shape.head-dim=32", "--shape.ffn=704", "--shape.vocab-size=4096", "--shape.max-seq-len=256",
)  # fmt: skip


def run(source: Path, *words: str) -> None:
    """Run a command of a source tree."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "phalanx", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")


def train(source: Path, strategy: str, folder: Path) -> tuple[float, float]:
    """Train the decoder; return the median seconds of a step, and those until the first ended."""
    begin = time.time()
    run(
        source, "train", f"--strategy={strategy}", *SIZES, f"--steps={STEPS}", "--eval-every=0",
        "--eval-samples=2", "--threads=1", f"--corpus.cache={folder / 'cache'}",
        f"--out={folder / 'run'}", "--batch.microbatch=2", "--device=cpu",
    )  # fmt: skip
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines if '"kind": "step"' in line]
    seconds = statistics.median(each["wall_s"] for each in steps[WARMUP:])
    return seconds, steps[0]["time"] - begin


def loop(source: Path, strategy: str, folder: Path) -> tuple[float, float]:
    """Run `main_of_loop` on ranks; return what `train` returns."""
    begin = time.time()
    run(
        source, "run", __file__, f"--strategy={strategy}", "--no-proof", "--threads=1", "--",
        str(folder / "times.json"),
    )  # fmt: skip
    ends: list[float] = json.loads((folder / "times.json").read_text())
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return statistics.median(steps[WARMUP:]), ends[0] - begin


def main_of_loop(out: Path) -> None:
    """Train 102 Linear layers in a loop of one's own, and write when each step ended."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import phalanx

    session = phalanx.init()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(128, 128) for _ in range(102)])
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    data = TensorDataset(*torch.randn(2, 64 * 5 * STEPS, 128))
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, 64))
    ends: list[float] = []
    for x, y in loader:
        session.backward(mean_of_rows=nn.functional.mse_loss(model(x), y), count=len(y))
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.time())
    if session.is_first:
        out.write_text(json.dumps(ends))


CASES: dict[str, tuple[Callable[[Path, str, Path], tuple[float, float]], str]] = {
    **{f"train {each}": (train, each) for each in ("dp2", "fsdp2", "tp2", "pp2")},
    **{f"loop {each}": (loop, each) for each in ("dp2", "fsdp2")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CASES, action="append", default=[])
    args = parser.parse_args()
    trees = {"before": args.tree.resolve(), "after": ROOT}
    rows: dict[str, Any] = {}
    for name, (measure, strategy) in CASES.items():
        if args.only and name not in args.only:
            continue
        times: dict[str, list[tuple[float, float]]] = {each: [] for each in trees}
        for number in range(args.rounds):
            # Turns, so that neither tree is always first.
            for each in [*trees][:: -1 if number % 2 else 1]:
                with tempfile.TemporaryDirectory() as folder:
                    times[each].append(measure(trees[each], strategy, Path(folder)))
        rows[name] = times
        for what, column in (("step", 0), ("first step", 1)):
            before, after = ([pair[column] for pair in times[each]] for each in trees)
            ratios = [a / b for a, b in zip(before, after, strict=True)]
            print(
                f"{name:<12} {what:<10} {statistics.median(before):8.4f} s before, "
                f"{statistics.median(after):8.4f} s after, ratio {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )
    document = {"date": date.today().isoformat(), "rounds": args.rounds, "rows": rows}
    args.file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main_of_loop(Path(sys.argv[1]))
    else:
        main()
