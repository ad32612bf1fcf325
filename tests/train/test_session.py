"""A session that scales its loss goes on with the scale it had."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from phalanx.launch.local import run_ranks
from phalanx.train import session as sessions
from phalanx.train.job import Job, resolve
from phalanx.train.precision import Precision
from small_run import small_run


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
    config = small_run(tmp_path, precision="float32", strategy="dp2", steps=5)
    (whole, losses), _ = run_ranks(state_after, 2, resolve(config), 5, False, threads=1)
    job = resolve(dataclasses.replace(config, out=str(tmp_path / "part")))
    (part, _), _ = run_ranks(state_after, 2, job, 3, True, threads=1)
    assert part["scale"] == 2 * 65536 and part["_growth_tracker"] == 1
    job = resolve(dataclasses.replace(config, out=None, resume=str(tmp_path / "part")))
    (again, last), _ = run_ranks(state_after, 2, job, 2, False, threads=1)
    assert again == whole
    assert last == losses[3:]
