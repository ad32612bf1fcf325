"""Record what runs compute, to the bit, and compare two records.

Three kinds of runs: `phalanx train` on text, the trainer on `job.py`, the loop of `loop.py`.

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
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STEPS = 10
FIRST_STEPS = 6
"""Steps before a checkpoint, in a run that is resumed."""
TRAIN = (
    "dp1", "dp2", "dp2:naive", "fsdp2", "fsdp2:zero2", "fsdp2:zero1", "dp2,fsdp2",
    "tp2", "tp2:megatron", "tp4:2d", "tp8:2.5d/2", "tp8:3d", "dp2,tp2", "fsdp2,tp2",
    "dp2,recompute:full", "dp2,recompute:every/2", "dp2,recompute:sqrt",
    "dp2,recompute:selective", "fsdp2,recompute:full",
    "pp2:naive", "pp2:gpipe", "pp2", "pp2:interleaved/2", "pp2:zb/1", "pp2:zbv", "pp2:dualpipev",
    "pp2,fsdp2", "pp2,dp2,tp2", "cp2", "cp2:ulysses", "fsdp2,cp2",
)  # fmt: skip
TRAIN_RESUMED = ("dp2", "fsdp2", "pp2", "tp2", "cp2")
SCRIPT = ("dp1", "dp2", "fsdp2", "pp2", "pp2:zbv")
LOOP = ("dp1", "dp2", "fsdp2", "dp2,fsdp2")
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


def run(source: Path, *words: str) -> str:
    """Run phalanx from a source tree, and return what it writes to standard output."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "phalanx", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def measured(out: Path, shown: str, strategy: str) -> dict[str, Any]:
    """Return a run's losses, norms and evaluations, and its bytes and memory in one step.

    How long a message stays in memory depends on when it arrives: the bytes of communication are
    left out, and under pp and fsdp the peak of all kinds together.
    """
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    if len(steps) != STEPS:
        raise SystemExit(f"{out}: {len(steps)} steps are recorded, expected {STEPS}")
    document = json.loads(shown.splitlines()[-1])
    is_timed = "pp" in strategy or "fsdp" in strategy
    of_messages = ("communication", "other") if is_timed else ("communication",)
    memory = {
        when: {kind: size for kind, size in held.items() if kind not in of_messages}
        for when, held in (document["memory"] or {}).items()
        if when in ("at_most", "at_end") or (when == "at_peak" and not is_timed)
    }
    return {
        "loss": [line["loss"] for line in steps],
        "norm": [line["grad_norm"] for line in steps],
        "evaluation": [line["loss"] for line in lines if line["kind"] == "evaluation"],
        "sent": document["sent"],
        "memory": memory,
    }


def in_parts(source: Path, words: list[str], out: Path, *, is_resumed: bool) -> str:
    """Train in one part or in two, the second from the first one's checkpoint."""
    if not is_resumed:
        return run(source, *words, f"--steps={STEPS}", f"--out={out}", "--json")
    run(source, *words, f"--steps={FIRST_STEPS}", f"--out={out}")
    return run(source, *words, f"--steps={STEPS}", f"--resume={out}", "--json")


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each tensor in the safetensors files of a folder, by name."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                data = file.get_tensor(name).contiguous().flatten().view(torch.uint8)
                key = f"{path.name}:{name}" if name in found else name
                found[key] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    return found


def train(
    source: Path, strategy: str, folder: Path, precision: str, *, is_resumed: bool
) -> dict[str, Any]:
    """Train the decoder on text."""
    out, exported = folder / "run", folder / "exported"
    words = [
        "train", f"--strategy={strategy}", f"--precision={precision}",
        *(f"--shape.{name}={value}" for name, value in SIZES.items()),
        f"--data={folder.parent / 'text.jsonl'}", "--corpus.seq-len=48", "--corpus.vocab-size=500",
        f"--corpus.cache={folder.parent / 'cache'}", "--batch.global-size=16",
        "--batch.microbatch=4", "--eval-every=5", "--eval-samples=8", "--threads=1",
        "--device=cpu",
    ]  # fmt: skip
    numbers = measured(out, in_parts(source, words, out, is_resumed=is_resumed), strategy)
    run(source, "convert", str(out), str(exported))
    return {**numbers, "weights": digests(exported)}


def script(source: Path, strategy: str, folder: Path, *, is_resumed: bool) -> dict[str, Any]:
    """Train `job.py` by the trainer."""
    out = folder / "run"
    words = [
        "train", f"--script={HERE / 'job.py'}:job", f"--strategy={strategy}", "--eval-every=5",
        "--threads=1", "--device=cpu",
    ]  # fmt: skip
    numbers = measured(out, in_parts(source, words, out, is_resumed=is_resumed), strategy)
    return {**numbers, "weights": digests(out)}


def loop(source: Path, strategy: str, folder: Path, *, is_resumed: bool) -> dict[str, Any]:
    """Run `loop.py`, which has its own loop."""
    parts: list[dict[str, Any]] = []
    for number, steps in enumerate([FIRST_STEPS, STEPS - FIRST_STEPS] if is_resumed else [STEPS]):
        out = folder / f"{number}.json"
        options = ["--resume"] if number else []
        run(
            source, "run", str(HERE / "loop.py"), f"--strategy={strategy}", "--",
            str(out), str(steps), str(folder / "saved"), *options,
        )  # fmt: skip
        parts.append(json.loads(out.read_text()))
    return {
        "loss": [loss for part in parts for loss in part["loss"]],
        "norm": [norm for part in parts for norm in part["norm"]],
        "weights": parts[-1]["weights"],
    }


def all_runs() -> dict[str, Callable[[Path, Path], dict[str, Any]]]:
    """Return each run by its name: kind, strategy, precision, and whether it is resumed."""
    runs: dict[str, Callable[[Path, Path], dict[str, Any]]] = {}

    def add(kind: Any, strategy: str, *, is_resumed: bool, **options: str) -> None:
        def recorded(source: Path, folder: Path) -> dict[str, Any]:
            return kind(source, strategy, folder, is_resumed=is_resumed, **options)

        words = [kind.__name__, strategy, *options.values(), *["resumed"] * is_resumed]
        runs[" ".join(words)] = recorded

    for strategy in TRAIN:
        for precision in PRECISIONS:
            add(train, strategy, is_resumed=False, precision=precision)
    for strategy in TRAIN_RESUMED:
        add(train, strategy, is_resumed=True, precision="float32")
    for kind, strategies in ((script, SCRIPT), (loop, LOOP)):
        for strategy in strategies:
            for is_resumed in (False, True):
                add(kind, strategy, is_resumed=is_resumed)
    return runs


def record(args: argparse.Namespace) -> None:
    """Make the runs whose names match, and write what they computed to a file."""
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        write_text(Path(name) / "text.jsonl")
        for key, recorded in all_runs().items():
            if args.only and not any(fnmatch(key, pattern) for pattern in args.only):
                continue
            folder = Path(name) / f"{len(done)}"
            folder.mkdir()
            done[key] = recorded(args.source.resolve(), folder)
            print(f"{key}: last loss {done[key]['loss'][-1]}", flush=True)
    args.file.write_text(json.dumps(done, indent=1) + "\n")


def compare(args: argparse.Namespace) -> None:
    before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
    shared = [key for key in before if key in after]
    num_different = 0
    for key in shared:
        differing = [what for what in before[key] if before[key][what] != after[key].get(what)]
        if not differing:
            print(f"{key:<40} equal to the bit")
            continue
        num_different += 1
        pairs = list(zip(before[key]["loss"], after[key]["loss"], strict=True))
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        print(
            f"{key:<40} {', '.join(differing)} differ; first loss: step {first}, worst {worst:.1e}"
        )
    print(f"{len(shared) - num_different} of {len(shared)} runs are equal to the bit")
    sys.exit(1 if num_different or not shared else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--source", type=Path, default=ROOT)
    recording.add_argument(
        "--only", action="append", help="only runs whose name matches, such as 'train pp2*'"
    )
    recording.set_defaults(call=record)
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(call=compare)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
