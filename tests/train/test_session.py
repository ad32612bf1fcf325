"""What a session takes up from a checkpoint, and what it leaves alone."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from model_folder import model_folder
from phalanx.checkpoint import manifest
from phalanx.comm.together import barrier
from phalanx.config import ShapeConfig
from phalanx.errors import CheckpointError
from phalanx.hugging_face.companions import TOKENIZER, family_in
from phalanx.hugging_face.convert import convert
from phalanx.launch.local import run_ranks
from phalanx.train import loop, run, text
from phalanx.train.evaluate import Evaluation
from phalanx.train.job.resolve import Job, manifest_of, resolve
from phalanx.train.precision import Precision
from phalanx.train.run import train
from phalanx.train.session import Session
from small_run import small_run


def state_after(job: Job, num_steps: int, save: bool) -> tuple[dict[str, Any], list[float]]:
    """Take steps with a scaler; return its state, and the loss of each step."""
    text.resolve = lambda *_: Precision(torch.float32, torch.float32, needs_scaler=True)
    session = text.TextSession(job)
    scaler = session.step.scaler
    if job.start is None:
        scaler.set_growth_interval(2)
    with session.loader:
        losses = [session.step(next(session.loader)).loss for _ in range(num_steps)]
        if save:
            session.begin_save()
            session.saver.finish()
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


class BehindOnce(text.TextSession):
    """A session whose save after step 2 finds other workers ahead, as parameter servers may."""

    is_behind = False

    def begin_save(self, *, is_passing: bool = False) -> None:
        self.is_behind = self.step.steps_done == 2
        if not self.is_behind:
            super().begin_save(is_passing=is_passing)


def best_of(job: Job, measured: list[float]) -> int:
    loop.evaluate = lambda session: Evaluation(
        session.step.steps_done, measured[session.step.steps_done]
    )
    session = BehindOnce(job)
    loop.train(session)
    assert session.best is not None
    return session.best.step


def test_an_evaluation_of_weights_that_were_not_saved_is_not_the_best(tmp_path: Path) -> None:
    job = resolve(small_run(tmp_path, strategy="dp1", steps=4, eval_every=1, save="best=min:loss"))
    (step,) = run_ranks(best_of, 1, job, [9.0, 4.0, 1.0, 2.0, 3.0], threads=1)
    assert step == 3 and {3, 4} <= manifest.complete_checkpoints(job.out).keys()


def words_of_opening(job: Job) -> str:
    try:
        text.TextSession(job)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_that_another_run_has_used_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    job = resolve(small_run(tmp_path, strategy="dp1", steps=2))
    folder = manifest.folder_of(job.out, 7)
    folder.mkdir(parents=True)
    manifest.write(folder, manifest_of(job, 7, 0))
    (job.out / TOKENIZER).write_text("of the other run")
    (words,) = run_ranks(words_of_opening, 1, job, threads=1)
    assert words.startswith(f"cannot save in {job.out}: {job.out} holds checkpoints of another run")
    assert (job.out / TOKENIZER).read_text() == "of the other run"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_from_damaged_weights_leaves_nothing_that_it_made(
    tmp_path: Path, is_new: bool
) -> None:
    config = small_run(tmp_path, strategy="dp1", steps=1)
    run_ranks(state_after, 1, resolve(config), 1, True, threads=1)
    shard = manifest.find(tmp_path / "run") / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    out, kept = tmp_path / "new", tmp_path / "new" / "notes.txt"
    if not is_new:
        out.mkdir()
        kept.write_text("of the user")
    with pytest.raises(CheckpointError, match=r"cannot load the weights in .* is damaged"):
        train(dataclasses.replace(config, init=config.out, out=str(out), shape=ShapeConfig()))
    assert (out.exists(), kept.exists()) == (not is_new, not is_new)


def announced(job: Job) -> list[str]:
    lines: list[str] = []
    text.announce = lines.append
    with text.TextSession(job):
        return lines


def test_a_run_begins_with_the_weights_that_replaced_those_it_found(tmp_path: Path) -> None:
    """The run of --init saves, and removes the checkpoint before, while the data is prepared."""
    config = small_run(tmp_path, strategy="dp1", steps=1)
    run_ranks(state_after, 1, resolve(config), 1, True, threads=1)
    out = str(tmp_path / "new")
    job = resolve(dataclasses.replace(config, init=config.out, out=out, shape=ShapeConfig()))
    found, latest = (manifest.folder_of(tmp_path / "run", step) for step in (1, 2))
    found.rename(latest)
    (lines,) = run_ranks(announced, 1, job, threads=1)
    assert f"read weights from {latest}, which its run has saved meanwhile" in lines


def words_as_under_torchrun(job: Job) -> str:
    """Begin a run on ranks that are there, which all see the refusal while the first removes."""
    try:
        run._train_here(None, run.NOTHING, job)
    except CheckpointError as error:
        barrier()
        return str(error)
    return ""


def test_the_first_rank_of_torchrun_removes_what_it_made(tmp_path: Path) -> None:
    config = small_run(tmp_path, strategy="dp2", steps=1)
    run_ranks(state_after, 2, resolve(config), 1, True, threads=1)
    shard = manifest.find(tmp_path / "run") / "rank-00000.safetensors"
    out = tmp_path / "new"
    job = resolve(dataclasses.replace(config, init=config.out, out=str(out), shape=ShapeConfig()))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    words, same = run_ranks(words_as_under_torchrun, 2, job, threads=1)
    assert words == same and "is damaged" in words
    assert not out.exists()


class Opened(Session):
    """A session of which only the end is of interest."""

    is_first = False  # uploads nothing

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.saver, self.in_memory = cast(Any, contextlib.ExitStack()), None
        self.saver.push(self.note)

    def note(self, _kind: object, error: object, _trace: object) -> None:
        self.seen.append(error)

    def close(self) -> None:
        self.seen.append("closed")


Opened.__abstractmethods__ = frozenset()


def test_the_saver_learns_of_the_error_that_ends_training() -> None:
    """After a lost rank the saver waits for less: without the error it would wait for the rank."""
    session, error = Opened(), RuntimeError("Connection reset by peer")
    with pytest.raises(RuntimeError), session:
        raise error
    assert session.seen == [error, "closed"]


def first_losses(job: Job) -> list[float]:
    with text.TextSession(job) as session:
        return [session.step(next(session.loader)).loss for _ in range(2)]


def test_a_hugging_face_folder_begins_a_run_as_its_conversion_does(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    convert(folder, tmp_path / "converted")
    config = small_run(tmp_path, strategy="dp2", steps=2, shape=ShapeConfig())
    job = resolve(dataclasses.replace(config, init=str(tmp_path / "converted")))
    expected = run_ranks(first_losses, 2, job, threads=1)[0]
    for strategy in ("fsdp2", "tp2", "pp2"):
        out = str(tmp_path / strategy)
        of_folder: dict[str, Any] = {"model": str(folder), "strategy": strategy, "out": out}
        job = resolve(dataclasses.replace(config, **of_folder))
        assert job.name == "tiny" and job.tokens.tokenizer_digest
        found = run_ranks(first_losses, 2, job, threads=1)[0]
        assert found == pytest.approx(expected, rel=1e-12)
        assert family_in(job.out) == "llama"
