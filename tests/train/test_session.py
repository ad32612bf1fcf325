"""A session that scales its loss goes on with the scale it had."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from phalanx.config import BatchConfig, CorpusConfig, ShapeConfig, TrainConfig
from phalanx.launch.local import run_ranks
from phalanx.train import session as sessions
from phalanx.train.job import Job, resolve
from phalanx.train.precision import Precision


def state_after(job: Job, num_steps: int, save: bool) -> tuple[dict[str, Any], list[float]]:
    """Take steps with a scaler; return its state, and the loss of each step."""
    sessions.resolve = lambda *_: Precision(torch.float32, torch.float32, needs_scaler=True)
    session = sessions.open_session(job)
    scaler = session.trainer.scaler
    assert scaler is not None
    if job.start is None:
        scaler.set_growth_interval(2)
    with session.loader:
        losses = [session.trainer.step(next(session.loader)).loss for _ in range(num_steps)]
        if save:
            session.save()
    return scaler.state_dict(), losses


def test_the_scale_of_the_loss_is_saved_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "squares.txt").write_text("".join(f"{n} {n * n} {n**3}\n" for n in range(400)))
    config = TrainConfig(
        data=str(tmp_path / "squares.txt"), device="cpu", precision="float32", strategy="dp2",
        steps=5, threads=1, out=str(tmp_path / "whole"),
        shape=ShapeConfig(
            num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn=24,
            vocab_size=300, max_seq_len=32,
        ),
        corpus=CorpusConfig(seq_len=16, cache=str(tmp_path / "cache"), validation=0),
        batch=BatchConfig(global_size=4),
    )  # fmt: skip
    (whole, losses), _ = run_ranks(state_after, 2, resolve(config), 5, False, threads=1)
    job = resolve(dataclasses.replace(config, out=str(tmp_path / "part")))
    (part, _), _ = run_ranks(state_after, 2, job, 3, True, threads=1)
    assert part["scale"] == 2 * 65536 and part["_growth_tracker"] == 1
    job = resolve(dataclasses.replace(config, out=None, resume=str(tmp_path / "part")))
    (again, last), _ = run_ranks(state_after, 2, job, 2, False, threads=1)
    assert again == whole
    assert last == losses[3:]
