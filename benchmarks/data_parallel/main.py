"""Tokens a second beside a loop around transformers written by hand, whole processes interleaved.

python benchmarks/data_parallel/main.py ddp|fsdp [--rounds 5] [--steps 12] [--out FILE.json]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from phalanx.measure.environment import environment

ROOT = Path(__file__).parents[2]
SHAPE = {
    "num-layers": 8, "hidden": 512, "num-heads": 8, "num-kv-heads": 8, "head-dim": 64, "ffn": 1408,
    "vocab-size": 8192, "max-seq-len": 256, "tied": "false",
}  # fmt: skip
WARMUP_STEPS = 3


def phalanx_command(strategy: str, steps: int, out: str, *more: str) -> list[str]:
    shape = [f"--shape.{name}={value}" for name, value in SHAPE.items()]
    return [
        sys.executable, "-m", "phalanx", "train", "--json", f"--strategy={strategy}", *shape,
        "--corpus.no-document-mask", f"--steps={steps + WARMUP_STEPS}", "--eval-every=0",
        "--eval-samples=2", "--precision=bfloat16", "--threads=1", f"--out={out}",
        "--batch.microbatch=8", "--optimizer.lr=3e-4", *more,
    ]  # fmt: skip


STRATEGIES = {
    "ddp": ("dp2", "dp2:naive"),
    "fsdp": ("fsdp2", "fsdp2:zero2", "fsdp2:zero1"),
}
LOOP = "transformers, by hand"


def commands(against: str, steps: int, out: str) -> dict[str, list[str]]:
    loop = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        "benchmarks/data_parallel/transformers_loop.py", f"--wrap={against}", f"--steps={steps}",
        f"--warmup={WARMUP_STEPS}",
    ]  # fmt: skip
    ours = {f"phalanx {s}": phalanx_command(s, steps, out) for s in STRATEGIES[against]}
    return {**ours, LOOP: loop}


def tokens_per_s(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("against", choices=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {}
    for number in range(args.rounds):
        for name in commands(args.against, args.steps, ""):
            with tempfile.TemporaryDirectory() as out:
                rate = tokens_per_s(commands(args.against, args.steps, out)[name])
            rates.setdefault(name, []).append(rate)
            print(f"round {number + 1}: {name:<22} {rate:8,.0f} tokens/s", flush=True)
    baseline = rates[LOOP]
    print("\n| | tokens/s, median | min | max | against the loop by hand, round by round: median |")
    print("|---|---:|---:|---:|---:|")
    rows = {}
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, baseline, strict=True))
        rows[name] = {"tokens_per_s": values, "median": statistics.median(values), "ratio": ratio}
        numbers = (statistics.median(values), min(values), max(values))
        print(f"| {name} |", " | ".join(f"{n:,.0f}" for n in numbers), f"| {ratio:.2f}x |")
    if args.out is not None:
        document = {
            "date": date.today().isoformat(),
            "against": args.against,
            "environment": environment(),
            "rounds": args.rounds,
            "steps": args.steps,
            "commands": {
                name: " ".join(command[1:])
                for name, command in commands(args.against, args.steps, "OUT").items()
            },
            "rows": rows,
        }
        args.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
