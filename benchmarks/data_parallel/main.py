"""Tokens a second beside a loop around transformers written by hand, whole processes interleaved.

python benchmarks/data_parallel/main.py ddp|fsdp [--rounds 5] [--steps 12] [--precision float32]
    [--out FILE.json]
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import last_json, spread, train_command, write_result

WARMUP_STEPS = 3

STRATEGIES = {
    "ddp": ("dp2", "dp2:naive"),
    "fsdp": ("fsdp2", "fsdp2:zero2", "fsdp2:zero1"),
}
LOOP = "transformers, by hand"


def commands(against: str, steps: int, precision: str, out: str) -> dict[str, list[str]]:
    loop = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        "benchmarks/data_parallel/transformers_loop.py", f"--wrap={against}", f"--steps={steps}",
        f"--warmup={WARMUP_STEPS}", f"--precision={precision}",
    ]  # fmt: skip
    num_steps = steps + WARMUP_STEPS
    ours = {
        f"phalanx {s}": train_command(s, num_steps, out, precision=precision)
        for s in STRATEGIES[against]
    }
    return {**ours, LOOP: loop}


def tokens_per_s(args: argparse.Namespace, name: str, out: str) -> float:
    run = commands(args.against, args.steps, args.precision, out)[name]
    return last_json(run)["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("against", choices=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {}
    for number in range(args.rounds):
        for name in commands(args.against, args.steps, args.precision, ""):
            with tempfile.TemporaryDirectory() as out:
                rate = tokens_per_s(args, name, out)
            rates.setdefault(name, []).append(rate)
            print(f"round {number + 1}: {name:<22} {rate:8,.0f} tokens/s", flush=True)
    baseline = rates[LOOP]
    print("\n| | tokens/s, median | min | max | against the loop by hand, round by round: median |")
    print("|---|---:|---:|---:|---:|")
    rows = {}
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, baseline, strict=True))
        rows[name] = {"tokens_per_s": values, "median": statistics.median(values), "ratio": ratio}
        print(f"| {name} | {spread(values, ',.0f')} | {ratio:.2f}x |")
    run = commands(args.against, args.steps, args.precision, "OUT")
    document = {
        "against": args.against,
        "rounds": args.rounds,
        "steps": args.steps,
        "precision": args.precision,
        "commands": {name: " ".join(command[1:]) for name, command in run.items()},
        "rows": rows,
    }
    write_result(args.out, document)


if __name__ == "__main__":
    main()
