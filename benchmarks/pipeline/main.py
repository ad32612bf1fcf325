"""Tokens a second of `pp2` beside a loop around transformers by hand, whole processes interleaved.

python benchmarks/pipeline/main.py [--rounds 5] [--steps 8] [--out FILE.json]
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import last_json, spread, train_command, write_result

WARMUP_STEPS = 2
LOOP = "by hand, 4 and 4 layers"
MICROBATCHES = ("--batch.microbatch=2", "--batch.accumulation=8")


def commands(steps: int, out: str) -> dict[str, list[str]]:
    loop = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        "benchmarks/pipeline/transformers_loop.py", f"--steps={steps}",
    ]  # fmt: skip
    ours = {
        f"phalanx {strategy}": [
            *train_command(strategy, steps + WARMUP_STEPS, out, precision="float32"),
            *MICROBATCHES,
        ]
        for strategy in ("pp2", "pp2:zb/1")
    }
    return {**ours, LOOP: loop, "by hand, 5 and 3 layers": [*loop, "--first-layers=5"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {}
    for number in range(args.rounds):
        for name in commands(args.steps, ""):
            with tempfile.TemporaryDirectory() as out:
                rate = last_json(commands(args.steps, out)[name])["tokens_per_s"]
            rates.setdefault(name, []).append(rate)
            print(f"round {number + 1}: {name:<24} {rate:8,.0f} tokens/s", flush=True)
    baseline = rates[LOOP]
    print("\n| | tokens/s, median | min | max | against 4 and 4 by hand, round by round: median |")
    print("|---|---:|---:|---:|---:|")
    rows = {}
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, baseline, strict=True))
        rows[name] = {"tokens_per_s": values, "median": statistics.median(values), "ratio": ratio}
        print(f"| {name} | {spread(values, ',.0f')} | {ratio:.2f}x |")
    run = commands(args.steps, "OUT")
    write_result(
        args.out,
        {
            "rounds": args.rounds,
            "steps": args.steps,
            "commands": {name: " ".join(command[1:]) for name, command in run.items()},
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
