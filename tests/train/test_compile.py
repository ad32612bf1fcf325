"""--compile: the blocks stay compiled at each step, watched or not; a run resumes bitwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend

from phalanx.checkpoint import manifest
from phalanx.config import BatchConfig, TrainConfig
from phalanx.launch.local import run_ranks
from phalanx.report.output import values_of
from phalanx.train import loop, run
from phalanx.train.evaluate import evaluate
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.report.records import LEDGER_STEP, MEMORY_STEP
from phalanx.train.step import Step
from small_run import losses, small_run


def graphs_run(job: Job) -> dict[str, Any]:
    """Train with a compiler that counts; return the graphs that each part of the run called."""
    runs = 0
    backend = lookup_backend("aot_eager")

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled = backend(graph, inputs)

        def call(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return compiled(*args)

        return call

    def counted(function: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = runs
            result = function(*args)
            found.append(runs - before)
            return result

        return call

    steps: list[int] = []
    evaluations: list[int] = []
    compile_ = nn.Module.compile
    nn.Module.compile = lambda self, **options: compile_(self, backend=counting, **options)
    Step.__call__ = counted(Step.__call__, steps)
    loop.evaluate = counted(evaluate, evaluations)
    summary = run.train_rank(job)
    return {"steps": steps, "evaluations": evaluations, "after": runs, "summary": summary}


def run_compiled(folder: Path, phase: str, **settings: Any) -> TrainConfig:
    """Run six compiled steps on two ranks; check that every call ran compiled.

    `phase` is the phase of a step in which data parallelism sends.
    """
    config = small_run(
        folder, steps=6, save="every=2", eval_every=3, compile=True, precision="float32", **settings
    )
    found = run_ranks(graphs_run, 2, resolve(config), threads=1)
    assert max(LEDGER_STEP, MEMORY_STEP) < 6  # both are among the steps
    for rank in found:
        assert rank["steps"] == [config.batch.accumulation or 1] * 6
        assert len(set(rank["evaluations"])) == 1 and rank["evaluations"][0] > 0
        # The sample asks for another length of text with each token: it compiles nothing.
        assert rank["after"] == sum(rank["steps"]) + sum(rank["evaluations"])
    summary = values_of(found[0]["summary"])
    assert summary["memory"] is None and "--compile" in summary["no_memory"]
    assert any(entry["phase"] == phase for entry in summary["sent"])
    return config


def test_every_step_runs_compiled(tmp_path: Path) -> None:
    batch = BatchConfig(global_size=8, accumulation=1)
    # Where calls are compared, dp's reductions begin at their wait.
    run_compiled(tmp_path, "reduce", strategy="dp2", batch=batch, debug_comm=True)


@pytest.mark.slow
def test_a_compiled_run_resumes_bitwise(tmp_path: Path) -> None:
    batch = BatchConfig(global_size=8, accumulation=2)
    config = run_compiled(tmp_path, "backward", strategy="fsdp2,recompute:full", batch=batch)
    middle = manifest.folder_of(Path(config.out or ""), 2)
    again = dataclasses.replace(config, resume=str(middle), out=str(tmp_path / "again"))
    run_ranks(graphs_run, 2, resolve(again), threads=1)
    assert losses(again.out) == losses(config.out)[2:]
