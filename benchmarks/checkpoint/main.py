"""What a checkpoint of 1 GB costs: its rate beside torch.save, and the steps while it is written.

python benchmarks/checkpoint/main.py [--rounds 7] [--folder DIR] [--out FILE.json]
"""

import argparse
import dataclasses
import gc
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint.manifest import Manifest, folder_of
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.state import state_of
from phalanx.config import BatchConfig, CorpusConfig, ShapeConfig, TrainConfig
from phalanx.launch.local import run_ranks
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.text import TextSession

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import ROOT, spread, write_result

NUM_MATRICES, WIDTH = 20, 2048
"""Of the state whose saving is timed: 20 x 2048 x 2048 weights and two moments each, 1.007 GB."""

SHAPE = ShapeConfig(
    num_layers=11, hidden=768, num_heads=12, num_kv_heads=12, head_dim=64, ffn=2048,
    vocab_size=4096, max_seq_len=256, tied=False,
)  # fmt: skip
"""Of the training: 84 M parameters, so a state of 1.01 GB."""


def time_saves(folder: Path, rounds: int) -> dict[str, Any]:
    """Save the same state by turns with torch.save and as a checkpoint; both end on the disk."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_MATRICES)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = {name: tensor.detach() for name, tensor in state_of(model, optimizer).items()}
    times: dict[str, list[float]] = {"torch.save": [], "checkpoint": []}
    about = Manifest(
        steps_done=0, num_steps=0, consumed=0, num_ranks=2, strategy="dp2", shape={}, stream={}
    )
    saver = Saver(folder)
    for number in range(rounds + 1):  # the first is to warm up: it gets its memory from the system
        dist.barrier()
        if dist.get_rank() == 0:
            times["torch.save"].append(_time_torch_save(state, folder / "state.pt"))
        dist.barrier()
        begin_s = time.perf_counter()
        saver.begin(model, optimizer, dataclasses.replace(about, steps_done=number))
        saver.finish()
        times["checkpoint"].append(time.perf_counter() - begin_s)
        if dist.get_rank() == 0:
            shutil.rmtree(folder_of(folder, number))
    return {"state_bytes": sum(tensor.nbytes for tensor in state.values()), "times_s": times}


def _time_torch_save(state: dict[str, torch.Tensor], path: Path) -> float:
    begin_s = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    passed_s = time.perf_counter() - begin_s
    path.unlink()
    return passed_s


def time_steps(job: Job, rounds: int) -> dict[str, Any]:
    """Train; by turns take steps while a checkpoint is written, and as many without."""
    session = TextSession(job)
    state_bytes, rows = 0, []
    with session:
        for _ in range(3):
            _step(session)
        state = state_of(session.model, session.step.optimizer)
        state_bytes = sum(tensor.nbytes for tensor in state.values())
        del state
        for _ in range(rounds + 1):
            gc.collect()
            rows.append(_round(session))
    return {"state_bytes": state_bytes, "rounds": rows}


def _round(session: TextSession) -> dict[str, float]:
    """Time the steps during which one checkpoint is written, copy included, and as many after."""
    dist.barrier()
    begin_s = time.perf_counter()
    session.begin_save()
    copied_s = time.perf_counter()
    num_steps, is_writing = 0, torch.ones(1)
    while is_writing:
        _step(session)
        num_steps += 1
        is_writing = torch.tensor([float(session.saver.is_writing)])
        dist.all_reduce(is_writing)
    with_s = time.perf_counter() - begin_s
    session.saver.finish()
    dist.barrier()
    begin_without_s = time.perf_counter()
    for _ in range(num_steps):
        _step(session)
        dist.all_reduce(torch.ones(1))
    without_s = time.perf_counter() - begin_without_s
    return {
        "num_steps": num_steps,
        "copy_s": copied_s - begin_s,
        "step_with_s": with_s / num_steps,
        "step_without_s": without_s / num_steps,
        "ratio": with_s / without_s,
    }


def _step(session: TextSession) -> None:
    session.step([batch.to(session.comm.device) for batch in next(session.loader)])


def job_of(folder: Path, dtype: str) -> Job:
    return resolve(
        TrainConfig(
            data=str(ROOT / "src"), strategy="dp2", device="cpu", precision=dtype, steps=10_000,
            threads=1, out=str(folder / "run"), save="keep=1", shape=SHAPE,
            corpus=CorpusConfig(seq_len=256, cache=str(folder / "cache"), validation=0),
            batch=BatchConfig(microbatch=2),
        )
    )  # fmt: skip


def rows_of(saves: dict[str, Any], steps: dict[str, Any]) -> dict[str, Any]:
    """Return what is shown; the first round of each warms up and counts for nothing."""
    rates = {
        name: [saves["state_bytes"] / seconds / 1e9 for seconds in times[1:]]
        for name, times in saves["times_s"].items()
    }
    pairs = zip(rates["checkpoint"], rates["torch.save"], strict=True)
    rounds = steps["rounds"][1:]
    return {
        "rate_gb_s": rates,
        "rate_ratio": [ours / theirs for ours, theirs in pairs],
        "step_with_s": [row["step_with_s"] for row in rounds],
        "step_without_s": [row["step_without_s"] for row in rounds],
        "step_ratio": [row["ratio"] for row in rounds],
        "num_steps": [row["num_steps"] for row in rounds],
        "copy_s": [row["copy_s"] for row in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        saves = run_ranks(time_saves, 2, folder, args.rounds, threads=1)[0]
        steps = run_ranks(time_steps, 2, job_of(folder, args.precision), args.rounds, threads=1)[0]
    rows = rows_of(saves, steps)
    print("| | median | min | max |\n|---|---:|---:|---:|")
    for label, values in (
        ("torch.save, GB/s", rows["rate_gb_s"]["torch.save"]),
        ("checkpoint, GB/s", rows["rate_gb_s"]["checkpoint"]),
        ("checkpoint / torch.save, round by round", rows["rate_ratio"]),
        ("step without, s", rows["step_without_s"]),
        ("step while a checkpoint is written, s", rows["step_with_s"]),
        ("with / without, round by round", rows["step_ratio"]),
        ("steps while it is written", rows["num_steps"]),
        ("copy of the state, s", rows["copy_s"]),
    ):
        print(f"| {label} | {spread(values, '.2f')} |")
    document = {"precision": args.precision, "saves": saves, "steps": steps, "rows": rows}
    write_result(args.out, document)


if __name__ == "__main__":
    main()
