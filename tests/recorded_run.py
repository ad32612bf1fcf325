"""The folder of a run with records of every kind, as a run would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.measure.spans import CollectiveSpan, ComputeSpan, StepSpans, WaitSpan

TERMS = ("data", "forward", "backward", "communication", "bubble", "optimizer", "other")
ENVIRONMENT = {
    "kind": "environment",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "system": "Linux x86_64",
    "cpu": {"name": "A processor", "num_cores": 2, "num_threads": 1, "flags": ["avx2"]},
    "memory_bytes": 2**34,
    "gpus": [],
}


def forecast(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}


def config(strategy: str, **settings: Any) -> dict[str, Any]:
    shape = {"batch": {"global_size": 8, "microbatch": 2}}
    return {"kind": "config", "strategy": strategy, "model": "demo", **shape, **settings}


def step(number: int, wall_s: float = 0.07, **values: Any) -> dict[str, Any]:
    terms = {f"{term}_s": wall_s / 7 for term in TERMS}
    record = {"kind": "step", "time": 1.0, "step": number, "loss": 6 - number / 10, "tokens": 1024}
    return record | {"tokens_per_s": 1e4, "unit": "tokens", "wall_s": wall_s, **terms, **values}


def ranks(first: int, last: int) -> dict[str, Any]:
    """Rank 1 takes twice the time of rank 0 in forward."""
    by_rank = {term: [0.01, 0.02 if term == "forward" else 0.01] for term in TERMS}
    spread = {term: [[0.01, 0.01, 0.01]] * (last - first + 1) for term in (*TERMS, "wall")}
    return {
        "kind": "ranks", "steps": [*range(first, last + 1)], "hosts": ["a", "b"],
        "axes": {"dp": 2}, "spread": spread, "by_rank": {**by_rank, "wall": [0.07, 0.08]},
        "exposed": {"dp": [0.004, 0.002]},
    }  # fmt: skip


def memory(rank: int) -> dict[str, Any]:
    curve = {
        "at_s": [0.0, 0.01, 0.02],
        "phase": ["forward", "backward", "optimizer"],
        "bytes": {"parameters": [2**20] * 3, "activations": [0, 3 * 2**20, 0], "cast": [0] * 3},
    }
    planned = {"at_peak": {"parameters": 2**20, "activations": 2 * 2**20}}
    place = {"kind": "memory", "step": 3, "rank": rank, "stage": 0}
    return {**place, "curve": curve, "peak": 1, "predicted": planned}


def summary(**values: Any) -> dict[str, Any]:
    use = {
        "formula": "MFU = model FLOPs / (time x devices x peak)", "num_devices": 2,
        "model_flops_per_s": 6e9, "data_sheet_flops_per_s": None, "ceiling_flops_per_s": 1e10,
        "warnings": [],
    } | {
        f"{name}_{of}_{attention}": None if of == "data_sheet" else 0.31
        for name in ("mfu", "hfu")
        for of in ("data_sheet", "ceiling")
        for attention in ("causal", "full")
    }  # fmt: skip
    held = {"parameters": 2**20, "activations": 3 * 2**20}
    account = {
        "at_peak": held, "at_most": held, "peak_bytes": 2**22, "peak_phase": "backward",
        "largest_bytes": 2**22, "resident_bytes": 2**28,
    }  # fmt: skip
    sent = [
        {"phase": phase, "axis": "dp", "op": "all_reduce", "calls": 2, "payload_bytes": size,
         "sent_bytes": float(size)}
        for phase, size in (("backward", 2**21), ("metrics", 8))
    ]  # fmt: skip
    predicted = {
        "machine": "products measured in this run",
        "time_s": {"step": forecast(0.063, 0.07), "compute": forecast(0.012, 0.02)},
        "bytes": {"peak": forecast(2**22, 2**22), "activations": forecast(2**21, 3 * 2**20)},
        "bytes_at_peak": {"activations": forecast(2**21, 3 * 2**20)},
    }
    return {
        "kind": "summary", "run": "a decoder, dp2 on cpu", "utilization": use, "memory": account,
        "sent": sent, "predicted": predicted, "advice": "Use larger batches.",
        "resume": "phalanx train --resume runs/one --steps 40", **values,
    }  # fmt: skip


def spans(folder: Path, rank: int) -> None:
    """Write a profiled step: forward, backward with a reduction beneath, a wait for the rest."""
    begin = 100.0 + rank
    step = StepSpans(
        step=12, rank=rank, num_ranks=2, host="a", strategy="dp2", axes={"dp": 2},
        coords={"dp": rank}, begin_s=begin, end_s=begin + 0.07, unix_s=0.0, terms_s={},
    )  # fmt: skip
    reduced = CollectiveSpan(
        begin + 0.03, begin + 0.06, 0.01, "all_reduce", "dp", (0, 1), 0, None, 8, "backward", "0"
    )
    step.spans.extend(
        [
            ComputeSpan(begin, begin + 0.02, "forward", "forward", 0, "layers.0"),
            ComputeSpan(begin + 0.02, begin + 0.05, "backward", "backward", 0, "layers.0"),
            WaitSpan(begin + 0.05, begin + 0.06, "communication", "reduce", "dp"),
            ComputeSpan(begin + 0.06, begin + 0.07, "optimizer", "optimizer"),
            reduced,
        ]
    )
    step.write(folder)


def write_run(folder: Path, *records: dict[str, Any]) -> Path:
    """Write the records into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def whole_run(folder: Path, strategy: str = "dp2") -> Path:
    """Write a run of 12 steps on two ranks that has records of every kind; return its folder."""
    evaluations = [
        {"kind": "evaluation", "step": at, "loss": 6.1 - at / 10, "bits_per_byte": 4.2}
        for at in (0, 12)
    ]
    write_run(
        folder, ENVIRONMENT, config(strategy), evaluations[0], *map(step, range(1, 13)),
        ranks(1, 3), ranks(4, 12), memory(0), memory(1), evaluations[1], summary(),
    )  # fmt: skip
    (folder / "config.toml").write_text("")
    for rank in (0, 1):
        spans(folder, rank)
    return folder
