"""Steps of a decoder on one device, and the table of all results: pieces of run.sh.

python benchmarks/gpu/main.py decoder --model llama3-1b [--compile] --out FOLDER
python benchmarks/gpu/main.py table --out FOLDER
"""

import argparse
import functools
import json
import statistics
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write_result
from phalanx.account.activations import activations
from phalanx.account.flops import step_flops
from phalanx.account.parameters import num_parameters
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.data.samples import Batch
from phalanx.launch.local import run_ranks
from phalanx.measure.environment import device_name, free_memory_bytes
from phalanx.measure.peaks import peak_of
from phalanx.measure.products import quick_ceiling
from phalanx.measure.utilization import Utilization
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.registry import shape_of
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.session import compile_blocks
from phalanx.train.step import Step

WARMUP, STEPS = 3, 10
POLICIES = ("none", "selective", "full")
BUFFERS = 4 * 2**30
"""Memory for what passes: logits, gradients inside a block."""

TINY = ModelShape(
    vocab_size=97, num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn=48,
    max_seq_len=64,
)  # fmt: skip


def main() -> None:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("piece", choices=("decoder", "table"))
    parser.add_argument("--model", default="llama3-1b", help="a preset, or 'tiny'")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--recompute", choices=POLICIES, help="the first that fits if unset")
    parser.add_argument("--documents", type=int, default=1, help="in a row")
    parser.add_argument("--budget-s", type=float, default=300.0, help="for the timed steps")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.piece == "table":
        write_table(chosen.out)
        return
    result = measure_decoder(chosen)
    stem = f"decoder-{chosen.model}-{'compiled' if chosen.compile else 'eager'}"
    stem += f"-{chosen.documents}-documents" * (chosen.documents > 1)
    write_result(chosen.out / f"{stem}.json", result)
    print(json.dumps({key: result[key] for key in ("mfu", "step_s", "peak_bytes", "skipped")}))


def measure_decoder(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what one step takes, or why it cannot be taken."""
    shape = TINY if chosen.model == "tiny" else shape_of(chosen.model)
    seq_len = min(chosen.seq_len, shape.max_seq_len)
    free_bytes = free_memory_bytes(chosen.device)
    for recompute in [chosen.recompute] if chosen.recompute else POLICIES:
        strategy = Strategy.parse(f"recompute:{recompute}")
        kept = activations(shape, strategy, seq_len, 1, "bfloat16", device=chosen.device)
        need_bytes = 16 * num_parameters(shape).total + kept.peak + BUFFERS
        if need_bytes <= free_bytes:
            break
    facts: dict[str, Any] = {
        "model": chosen.model,
        "shape": asdict(shape),
        "seq_len": seq_len,
        "num_sequences": 1,
        "num_documents": chosen.documents,
        "recompute": recompute,
        "compiled": chosen.compile,
        "need_bytes": need_bytes,
        "free_bytes": free_bytes,
    }
    if chosen.device == "cuda" and need_bytes > free_bytes:
        skipped = f"needs {need_bytes / 2**30:.0f} GiB, {free_bytes / 2**30:.0f} are free"
        return {**facts, "skipped": skipped, "mfu": None, "step_s": None, "peak_bytes": None}
    (found,) = run_ranks(
        time_steps,
        1,
        shape,
        seq_len,
        recompute,
        chosen.compile,
        chosen.documents,
        chosen.budget_s,
        chosen.device,
        device=chosen.device,
    )
    return {**facts, **found}


def time_steps(
    shape: ModelShape,
    seq_len: int,
    recompute: str,
    is_compiled: bool,
    num_documents: int,
    budget_s: float,
    device_type: str,
) -> dict[str, Any]:
    """Train on random tokens, and time the steps."""
    strategy = Strategy.parse(f"recompute:{recompute}")
    comm = Ranks(strategy, device_type)
    device = comm.device
    ceiling = quick_ceiling(device, "bfloat16")
    with torch.device("meta"):
        model = Decoder(shape)
    model.compute_dtype = torch.bfloat16
    Plan(strategy, model, compute=torch.bfloat16).build(
        comm, functools.partial(fill_initial, shape, 0)
    )
    config = OptimizerConfig()
    step = Step(
        model, build_optimizer(model, config), NextToken(), config, comm=comm, num_steps=1000
    )
    if is_compiled:
        compile_blocks(model)
    batch = random_batch(shape, seq_len, num_documents)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    # As in training, the host waits for the GPU once a step, when the step reads its loss: the time
    # of a step is the interval between two returns.
    returned_s: list[float] = []
    for _ in range(WARMUP + STEPS):
        step([batch.to(device)])
        returned_s.append(time.perf_counter())
        if len(returned_s) > WARMUP and returned_s[-1] - returned_s[WARMUP - 1] > budget_s:
            break
    if is_cuda:
        torch.cuda.synchronize()
    times_s = [last_s - first_s for first_s, last_s in pairwise(returned_s[WARMUP - 1 :])]
    sizes = (shape, seq_len, 1)
    utilization = Utilization(
        causal=step_flops(*sizes, "causal", strategy.recompute),
        full=step_flops(*sizes, "full", strategy.recompute),
        time_s=statistics.median(times_s),
        num_devices=1,
        peak=peak_of(device_name(device), "bfloat16") if is_cuda else None,
        ceiling_flops_per_s=ceiling,
    )
    return {
        "skipped": None,
        "step_s": utilization.time_s,
        "times_s": times_s,
        "tokens_per_s": seq_len / utilization.time_s,
        "mfu": utilization.mfu("data sheet") if utilization.peak else utilization.mfu("ceiling"),
        "mfu_of": "data sheet" if utilization.peak else "ceiling",
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "utilization": utilization.as_dict(),
    }


def random_batch(shape: ModelShape, seq_len: int, num_documents: int) -> Batch:
    """Return a row of documents of one length."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(shape.vocab_size, (1, seq_len + 1), generator=generator)
    length = -(-seq_len // num_documents)
    positions_T = torch.arange(seq_len)
    return Batch(
        tokens_BT=tokens_BT[:, :-1].contiguous(),
        labels_BT=tokens_BT[:, 1:].contiguous(),
        positions_BT=(positions_T % length)[None],
        documents_BT=(positions_T // length)[None],
        rows_B=torch.zeros(1, dtype=torch.int64),
    )


def write_table(folder: Path) -> None:
    """Write what the folder's results say as a table."""
    lines = [
        "| what | step s | MFU | HFU | of | peak GiB | device | date |",
        "|---|---:|---:|---:|---|---:|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        lines += rows_of(path.stem, found)
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def rows_of(name: str, found: dict[str, Any]) -> list[str]:
    """Return the rows of one result: a decoder, or perceptrons by recipe."""
    gpus = found["environment"].get("gpus") or []
    device = gpus[0].get("name", "GPU") if gpus and isinstance(gpus[0], dict) else "CPU"
    ends = f"{device} | {found['date']} |"
    if "shape" in found:
        if found["skipped"]:
            return [f"| {name} | {found['skipped']} | | | | | {ends}"]
        peak = "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.1f}"
        of = found["mfu_of"].replace(" ", "_")
        mfu, hfu = (share_text(found["utilization"][f"{x}_{of}_causal"]) for x in ("mfu", "hfu"))
        if found["num_documents"] > 1:  # they attend to fewer pairs than the FLOPs count
            mfu = hfu = ""
        what = f"{name}, recompute:{found['recompute']}"
        cells = f"{found['step_s']:.3f} | {mfu} | {hfu} | {found['mfu_of']} | {peak}"
        return [f"| {what} | {cells} | {ends}"]
    rows: list[str] = []
    runs = [found, *found.get("beside", [])] if found.get("benchmark") == "mfu" else []
    for run in runs:
        used = run["utilization"]
        of = "data_sheet" if used["data_sheet_flops_per_s"] else "ceiling"
        mfu, hfu = (share_text(used[f"{x}_{of}_causal"]) for x in ("mfu", "hfu"))
        width = f"{run['num_layers']} x {run['width']}"
        cells = f"{used['time_s']:.3f} | {mfu} | {hfu} | {of.replace('_', ' ')}"
        rows.append(f"| perceptron {width}, {run['recipe']} | {cells} | | {ends}")
    return rows


def share_text(share: float | None) -> str:
    """Return a share in percent, or that it is unknown."""
    return "unknown" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
