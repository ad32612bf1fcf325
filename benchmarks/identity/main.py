"""Record what runs compute, to the bit, and compare two records.

A change that is meant to change no number is shown by two records of equal runs, one of each
source tree, made on the same machine:

python benchmarks/identity/main.py record before.json --source TREE
python benchmarks/identity/main.py record after.json
python benchmarks/identity/main.py compare before.json after.json
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).parents[2]
STEPS = 10
STRATEGIES = (
    "dp1", "dp2", "dp2:naive", "fsdp2", "fsdp2:zero2", "fsdp2:zero1", "dp2,fsdp2",
    "tp2", "tp4:2d", "tp8:2.5d/2", "tp8:3d", "dp2,tp2", "fsdp2,tp2",
    "dp2,recompute:full", "dp2,recompute:every/2", "dp2,recompute:sqrt",
    "dp2,recompute:selective", "fsdp2,recompute:full",
)  # fmt: skip
PRECISIONS = ("float32", "bfloat16")
SIZES = {
    "num-layers": 4, "hidden": 64, "num-heads": 8, "num-kv-heads": 8, "head-dim": 8, "ffn": 96,
    "vocab-size": 512, "max-seq-len": 64, "tied": "true", "dropout": 0.1,
}  # fmt: skip


def write_text(path: Path) -> None:
    """Write documents of words, the same at each call."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(800)]
    with path.open("w") as file:
        for _ in range(400):
            text = " ".join(draw.choices(words, k=draw.randint(5, 120)))
            file.write(json.dumps({"text": text}) + "\n")


def run(source: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "phalanx", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} exited with {done.returncode}:\n{done.stderr}")


def numbers_of(source: Path, strategy: str, precision: str, folder: Path) -> dict[str, Any]:
    """Train, and return each step's loss and norm and the digest of each weight at the end."""
    out, exported = folder / "run", folder / "exported"
    run(
        source, "train", f"--strategy={strategy}", f"--precision={precision}", f"--steps={STEPS}",
        *(f"--shape.{name}={value}" for name, value in SIZES.items()),
        f"--data={folder.parent / 'text.jsonl'}", "--corpus.seq-len=48", "--corpus.vocab-size=500",
        f"--corpus.cache={folder.parent / 'cache'}", "--batch.global-size=16",
        "--batch.microbatch=4", "--eval-every=5", "--eval-samples=8", "--threads=1",
        "--device=cpu", f"--out={out}",
    )  # fmt: skip
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    if len(steps) != STEPS:
        raise SystemExit(f"{strategy}: {len(steps)} steps are recorded, expected {STEPS}")
    run(source, "convert", str(out), str(exported))
    weights: dict[str, str] = {}
    for path in sorted(exported.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                data = file.get_tensor(name).contiguous().numpy().tobytes()
                weights[name] = hashlib.sha256(data).hexdigest()
    return {
        "loss": [line["loss"] for line in steps],
        "norm": [line["grad_norm"] for line in steps],
        "weights": weights,
    }


def record(args: argparse.Namespace) -> None:
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        write_text(Path(name) / "text.jsonl")
        for strategy in args.strategy or STRATEGIES:
            for precision in PRECISIONS:
                folder = Path(name) / f"{len(runs)}"
                folder.mkdir()
                key = f"{strategy} {precision}"
                runs[key] = numbers_of(args.source.resolve(), strategy, precision, folder)
                print(f"{key}: last loss {runs[key]['loss'][-1]}", flush=True)
    args.file.write_text(json.dumps(runs, indent=1) + "\n")


def compare(args: argparse.Namespace) -> None:
    before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
    shared = [key for key in before if key in after]
    num_different = 0
    for key in shared:
        differing = [
            what for what in ("loss", "norm", "weights") if before[key][what] != after[key][what]
        ]
        if not differing:
            print(f"{key:<36} equal to the bit")
            continue
        num_different += 1
        pairs = list(zip(before[key]["loss"], after[key]["loss"], strict=True))
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        print(
            f"{key:<36} {', '.join(differing)} differ; first loss: step {first}, worst {worst:.1e}"
        )
    print(f"{len(shared) - num_different} of {len(shared)} runs are equal to the bit")
    sys.exit(1 if num_different or not shared else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--source", type=Path, default=ROOT)
    recording.add_argument("--strategy", action="append", help="only these")
    recording.set_defaults(call=record)
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(call=compare)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
