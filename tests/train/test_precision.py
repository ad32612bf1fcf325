"""Masters stay wide: weights, gradients and moments, whatever the arithmetic is done in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.train.job.request import settle
from phalanx.train.job.resolve import Job, _check_split
from phalanx.train.job.resolve import resolve as resolve_job
from phalanx.train.precision import resolve
from phalanx.train.text import TextSession
from small_run import small_run

WIDE = {"float64": torch.float64}


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_masters_are_float32_or_wider(name: str) -> None:
    precision = resolve(name, "cuda")
    assert precision.master == WIDE.get(name, torch.float32)
    assert precision.compute == getattr(torch, name)
    assert precision.needs_scaler == (name == "float16")


def test_float16_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="nearest is bfloat16"):
        resolve("float16", "cpu")


def test_float16_is_refused_beside_a_pipeline(tmp_path: Path) -> None:
    request = settle(small_run(tmp_path, strategy="pp2"))
    config = dataclasses.replace(request.config, precision="float16")
    with pytest.raises(ConfigError, match=r"stages of pp2 would not agree .* nearest is bfloat16"):
        _check_split(dataclasses.replace(request, config=config))


def types_after_a_step(job: Job) -> set[torch.dtype]:
    session = TextSession(job)
    with session.loader:
        session.step(next(session.loader))
    parameters = list(session.model.parameters())
    states = [value for s in session.step.optimizer.state.values() for value in s.values()]
    return {t.dtype for t in (*parameters, *(p.grad for p in parameters), *states)}


def test_a_run_in_bfloat16_keeps_float32(tmp_path: Path) -> None:
    job = resolve_job(small_run(tmp_path, precision="bfloat16", strategy="dp1", steps=1))
    assert run_ranks(types_after_a_step, 1, job, threads=1) == [{torch.float32}]
