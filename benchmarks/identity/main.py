"""Record what runs compute, to the bit, and compare two records.

The name of a run is its command: `phalanx train` on text, the trainer on `job.py` or the loop of
`loop.py`, its strategy, its options, and whether it is saved after six steps and resumed.

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
import queue
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
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
KEPT = "save=every=2,keep=1,best="
PASSES = "epochs=1 corpus.max-bytes=30000"
"""A pass over 150 samples: its last batch is smaller."""
OTHERS = {
    # Options -> strategies that run with them; those after the bar are resumed too.
    "train": {
        "float32": "| dp2 fsdp2 pp2 tp2 cp2",
        "float32 no-shared-memory": "dp2 tp2 pp2 cp2 | fsdp2",
        "float32 compress=bf16": "dp2",
        "float32 compress=int8": "dp2,tp2 | dp2",
        "float32 compress=powersgd": "| dp2",
        "bfloat16 compress=int8": "dp2",
        "float32 shape.experts=num_experts=8,top_k=2,ffn=32,renormalizes=true": "ep2 | fsdp2,ep2",
        f"float32 {KEPT}min:loss": "dp2 | fsdp2",
        f"float32 {PASSES} corpus.tail=keep": "pp2 | dp2",
        f"float32 {PASSES} corpus.tail=pad": "dp2",
        # Of two workers that wait for each other the order of messages changes no sum.
        "float32 eval-every=4": "dp2:ssp/0 | dp2:ps dp2:local/2",
        "float32 eval-every=4 server.table-rule=adagrad shape.tied=false": "| dp2:ps",
    },
    "script": {
        "": "| dp1 dp2 fsdp2 pp2 pp2:zbv",
        "no-shared-memory": "dp2 fsdp2",
        "compress=int8": "dp2",
        "precision=bfloat16": "dp2 fsdp2",
        "job=odd": "fsdp2 pp2 | dp2",
        f"job=watched {KEPT}max:accuracy": "fsdp2 | dp2 pp2",
    },
    "loop": {
        "": "| dp1 dp2 fsdp2 dp2,fsdp2",
        "no-shared-memory": "dp2 fsdp2",
        "loss=mean": "dp1 dp2 dp2,fsdp2 | fsdp2",
        "loss=rows": "dp2 fsdp2",
        "loss=whole": "dp1 dp2,fsdp2 | dp2 fsdp2",
        "loss=mean model=tokens": "fsdp2 dp2,tp2 | dp2 tp2",
        "loss=whole model=tokens": "dp2 fsdp2 tp2",
        "average": "dp2 | fsdp2",
        "scaler": "fsdp2 | dp2",
    },
    "averages": {"by=call": "dp1 dp2", "by=optimizer": "dp2"},
}
"""The runs besides those of `TRAIN` in both precisions. `job` is a function of job.py, `loss` and
`model` are of loop.py, and the other options are settings of phalanx."""
SIZES = {
    "num-layers": 4, "hidden": 64, "num-heads": 8, "num-kv-heads": 8, "head-dim": 8, "ffn": 96,
    "vocab-size": 512, "max-seq-len": 64, "tied": "true", "dropout": 0.1,
}  # fmt: skip


def all_runs() -> list[str]:
    """Return the name of each run."""
    names = [f"train {each} {precision}" for each in TRAIN for precision in ("float32", "bfloat16")]
    for kind, groups in OTHERS.items():
        for options, strategies in groups.items():
            once, _, resumed = strategies.partition("|")
            for strategy in (*once.split(), *resumed.split()):
                names.append(" ".join([kind, strategy, *options.split()]))
                names += [f"{names[-1]} resumed"] * (strategy in resumed.split())
    return [*dict.fromkeys(names)]


def write_text(path: Path) -> None:
    """Write documents of words, the same at each call."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(800)]
    with path.open("w") as file:
        for _ in range(400):
            text = " ".join(draw.choices(words, k=draw.randint(5, 120)))
            file.write(json.dumps({"text": text}) + "\n")


class Lanes:
    """Processes that run commands of a source tree, each one command at a time."""

    def __init__(self, source: Path, count: int) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        environment = {**os.environ, "PYTHONPATH": f"{source / 'src'}{os.pathsep}{HERE}"}
        command, pipe = [sys.executable, str(HERE / "lane.py")], subprocess.PIPE
        for _ in range(count):
            lane = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
            self._idle.put(lane)

    def run(self, *words: str) -> str:
        """Run a command, and return what it writes to standard output."""
        lane = self._idle.get()
        assert lane.stdin is not None and lane.stdout is not None
        lane.stdin.write(json.dumps(words) + "\n")
        lane.stdin.flush()
        answer = lane.stdout.readline()
        self._idle.put(lane)
        code, shown, errors = json.loads(answer) if answer else (lane.wait(), "", "")
        if code:
            raise RuntimeError(f"{' '.join(words)} exited with {code}:\n{errors}")
        return shown

    def close(self) -> None:
        """End the processes."""
        while not self._idle.empty():
            self._idle.get().communicate()


def measured(out: Path, shown: str, strategy: str) -> dict[str, Any]:
    """Return a run's losses, norms and evaluations, and its bytes and memory in one step.

    How long a message stays in memory depends on when it arrives: the bytes of communication are
    left out, under pp and fsdp the peak of all kinds together, and all of a worker's memory.
    """
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    document = json.loads(shown.splitlines()[-1])
    is_timed = "pp" in strategy or "fsdp" in strategy
    of_messages = ("communication", "other") if is_timed else ("communication",)
    memory = {
        when: {kind: size for kind, size in held.items() if kind not in of_messages}
        for when, held in (document["memory"] or {}).items()
        if when in ("at_most", "at_end") or (when == "at_peak" and not is_timed)
    }
    kept = sorted(path.parent.name for path in out.glob("checkpoints/*/manifest.json"))
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    return {
        "loss": [line["loss"] for line in steps],
        "norm": [line["grad_norm"] for line in steps],
        "evaluation": [{n: v for n, v in each.items() if n != "time"} for each in evaluations],
        "sent": document["sent"],
        "memory": {} if document.get("served_text") else memory,
        "best": [document["best"], kept],
    }


def in_parts(lanes: Lanes, words: list[str], out: Path, *, is_resumed: bool) -> str:
    """Train in one part or in two, the second from the first one's checkpoint."""
    of_pass = [word for word in words if word.startswith("--epochs")]
    words = [word for word in words if word not in of_pass]
    length = of_pass or [f"--steps={STEPS}"]
    if not is_resumed:
        return lanes.run(*words, *length, f"--out={out}", "--json")
    lanes.run(*words, f"--steps={FIRST_STEPS}", f"--out={out}")
    return lanes.run(*words, *length, f"--resume={out}", "--json")


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
    lanes: Lanes, strategy: str, options: Sequence[str], folder: Path, *, is_resumed: bool
) -> dict[str, Any]:
    """Train the decoder on text; the first option is the precision."""
    out = folder / "run"
    words = [
        "train", f"--strategy={strategy}", f"--precision={options[0]}",
        *(f"--shape.{name}={value}" for name, value in SIZES.items()),
        f"--data={folder.parent / 'text.jsonl'}", "--corpus.seq-len=48", "--corpus.vocab-size=500",
        f"--corpus.cache={folder.parent / 'cache'}", "--batch.global-size=16",
        "--batch.microbatch=4", "--eval-every=5", "--eval-samples=8", "--threads=1",
        "--device=cpu", *(f"--{option}" for option in options[1:]),
    ]  # fmt: skip
    numbers = measured(out, in_parts(lanes, words, out, is_resumed=is_resumed), strategy)
    lanes.run("convert", str(out), str(folder / "exported"))
    return {**numbers, "weights": digests(folder / "exported")}


def script(
    lanes: Lanes, strategy: str, options: Sequence[str], folder: Path, *, is_resumed: bool
) -> dict[str, Any]:
    """Train `job.py` by the trainer; the option `job` names its function."""
    out, exported = folder / "run", folder / "weights.json"
    job = next((each[4:] for each in options if each.startswith("job=")), "job")
    words = [
        "train", f"--script={HERE / 'job.py'}:{job}", f"--strategy={strategy}",
        "--eval-every=5", "--threads=1", "--device=cpu",
        *(f"--{option}" for option in options if not option.startswith("job=")),
    ]  # fmt: skip
    numbers = measured(out, in_parts(lanes, words, out, is_resumed=is_resumed), strategy)
    export = ["run", str(HERE / "export.py"), "--strategy=dp1", "--threads=1", "--"]
    lanes.run(*export, job, str(out), str(exported))
    return {**numbers, "weights": json.loads(exported.read_text())}


def loop(
    lanes: Lanes, strategy: str, options: Sequence[str], folder: Path, *, is_resumed: bool
) -> dict[str, Any]:
    """Run `loop.py`, which has its own loop."""
    parts: list[dict[str, Any]] = []
    for number, steps in enumerate([FIRST_STEPS, STEPS - FIRST_STEPS] if is_resumed else [STEPS]):
        out = folder / f"{number}.json"
        # It is compared with itself, not with one process: BatchNorm is local under fsdp.
        lanes.run(
            "run", str(HERE / "loop.py"), f"--strategy={strategy}", "--no-proof", "--",
            str(out), str(steps), str(folder / "saved"), *options, *["resume"] * bool(number),
        )  # fmt: skip
        parts.append(json.loads(out.read_text()))
    return {
        key: [value for part in parts for value in part[key]]
        if isinstance(parts[0][key], list)
        else parts[-1][key]
        for key in parts[0]
    }


def averages(
    lanes: Lanes, strategy: str, options: Sequence[str], folder: Path, *, is_resumed: bool
) -> dict[str, Any]:
    """Run `averages.py`, a loop of plain PyTorch that averages its gradients."""
    del is_resumed
    out, script = folder / "0.json", str(HERE / "averages.py")
    lanes.run("run", script, f"--strategy={strategy}", "--no-proof", "--", str(out), *options)
    return json.loads(out.read_text())


KINDS = {"train": train, "script": script, "loop": loop, "averages": averages}


def recorded(lanes: Lanes, name: str, folder: Path) -> dict[str, Any]:
    """Make one run, and return what it computed, or its error."""
    kind, strategy, *options = name.split()
    is_resumed = options[-1:] == ["resumed"]
    options = options[: len(options) - is_resumed]
    folder.mkdir()
    try:
        numbers = KINDS[kind](lanes, strategy, options, folder, is_resumed=is_resumed)
    except RuntimeError as error:
        numbers = {"loss": [], "error": str(error)}
    print(f"{name}: {numbers.get('error') or numbers['loss'][-1]}", flush=True)
    return numbers


def record(args: argparse.Namespace) -> None:
    """Make the runs whose names match, and write what they computed to a file."""
    names = [
        name
        for name in all_runs()
        if not args.only or any(fnmatch(name, pattern) for pattern in args.only)
    ]
    lanes = Lanes(args.source.resolve(), args.jobs)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        write_text(Path(temporary) / "text.jsonl")
        folders = [Path(temporary) / f"{number}" for number in range(len(names))]
        done = dict(zip(names, pool.map(partial(recorded, lanes), names, folders), strict=True))
    lanes.close()
    args.file.write_text(json.dumps(done, indent=1) + "\n")
    if failed := [name for name, numbers in done.items() if "error" in numbers]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def compare(args: argparse.Namespace) -> None:
    before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
    shared = [key for key in before if key in after]
    num_different = 0
    for key in shared:
        keys = [*dict.fromkeys([*before[key], *after[key]])]
        differing = [what for what in keys if before[key].get(what) != after[key].get(what)]
        if not differing:
            print(f"{key:<64} equal to the bit")
            continue
        num_different += 1
        pairs = list(zip(before[key]["loss"], after[key]["loss"], strict=False))
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        worst = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
        print(
            f"{key:<64} {', '.join(differing)} differ; first loss: step {first}, worst {worst:.1e}"
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
    recording.add_argument("--jobs", type=int, default=2, help="runs at a time")
    recording.set_defaults(call=record)
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(call=compare)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
