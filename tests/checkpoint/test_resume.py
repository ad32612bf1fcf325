"""A run that stops and goes on: the same losses to the bit, and each sample once per epoch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from runs import folders

from marks import by_hand
from phalanx.checkpoint import manifest
from phalanx.config import BatchConfig, OptimizerConfig, TrainConfig
from phalanx.data.order import Order
from phalanx.data.samples import Samples
from phalanx.errors import CheckpointError
from phalanx.launch.local import run_ranks
from phalanx.train.job.resolve import Job, remarks_on, resolve
from phalanx.train.run import train
from phalanx.train.text import TextSession
from small_run import SHAPE, losses, small_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_run(
        tmp_path_factory.mktemp("resume"),
        num_lines=150,
        steps=12,
        seed=5,
        save="every=4,keep=3",
        eval_samples=2,
        shape=dataclasses.replace(SHAPE, num_layers=2, vocab_size=301, tied=True),  # rows to pad
        batch=BatchConfig(global_size=12),
        optimizer=OptimizerConfig(lr=1e-2),
    )


STRATEGIES = ["fsdp2", *map(by_hand, ("dp2", "dp2,fsdp2", "fsdp2:zero1", "fsdp2:zero2"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_next_eight_losses_are_the_same(
    config: TrainConfig, tmp_path: Path, strategy: str
) -> None:
    """Bit for bit on the same strategy, within rounding on the others."""
    whole = tmp_path / "whole"
    train(dataclasses.replace(config, strategy=strategy, out=str(whole)))
    expected = losses(whole)[4:]
    assert len(expected) == 8
    middle = str(manifest.folder_of(whole, 4))
    others = {"dp2": "fsdp3", "fsdp2": "dp1", "dp2,fsdp2": "fsdp2:zero1"}
    for again in (strategy, others.get(strategy, "dp2")):
        part = tmp_path / again
        train(dataclasses.replace(config, resume=middle, strategy=again, out=str(part)))
        if again == strategy:
            assert losses(part) == expected
        else:
            assert losses(part) == pytest.approx(expected, rel=1e-10)
    kept = sorted(manifest.complete_checkpoints(part))
    assert kept == [8, 12]


def test_a_run_resumes_from_its_last_whole_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    """One with a changed tensor is passed over, and set aside once the run goes on."""
    small = dataclasses.replace(config, strategy="dp2", out=str(tmp_path), steps=8)
    train(small)
    expected, last = losses(tmp_path), manifest.folder_of(tmp_path, 8)
    tensors = last / "rank-00001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    again, lines = dataclasses.replace(small, resume=str(tmp_path)), list[str]()
    train(again, announce=lambda job: lines.extend(remarks_on(job)))
    assert losses(tmp_path) == expected + expected[4:]
    assert lines == [
        f"resumes from step-00000004: {last}: its file rank-00001.safetensors is damaged: its "
        "sha256 differs from the recorded one; the run renames step-00000008 to "
        "step-00000008.damaged"
    ]
    assert folders(tmp_path) == ["step-00000004", "step-00000008", "step-00000008.damaged"]
    for name in (manifest.folder_of(tmp_path, 4), last):
        (name / manifest.NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=r"cannot read .*8/manifest.json: it has no 'format'"):
        train(again)


def take_steps(job: Job, num_steps: int) -> list[int]:
    """Take steps and save; return the rows of the global order that this rank had."""
    session = TextSession(job)
    rows: list[int] = []
    with session:
        for _ in range(num_steps):
            microbatches = next(session.loader)
            rows += [int(row) for batch in microbatches for row in batch.rows_B if row >= 0]
            session.step(microbatches)
        session.begin_save()
    return rows


def test_each_sample_comes_once_an_epoch_while_ranks_leave(
    config: TrainConfig, tmp_path: Path
) -> None:
    """Over two epochs: 4 ranks, then 3, then 2."""
    out = tmp_path / "run"
    config = dataclasses.replace(config, steps=None, epochs=2, out=str(out))
    job = resolve(dataclasses.replace(config, strategy="dp4"))
    num_steps = job.num_steps
    places: list[int] = []
    for strategy, steps in (("dp4", 2), ("dp3", 3), ("dp2", num_steps - 5)):
        resume = None if strategy == "dp4" else str(out)
        job = resolve(dataclasses.replace(config, strategy=strategy, resume=resume))
        assert job.num_steps == num_steps
        for rows in run_ranks(take_steps, job.strategy.num_ranks, job, steps, threads=1):
            places += rows
    assert sorted(places) == list(range(len(places)))
    num_samples = len(Samples(job.tokens.train, config.corpus.seq_len))
    samples = Order(num_samples, config.seed).samples(np.arange(len(places)))
    for epoch in (samples[:num_samples], samples[num_samples:]):
        assert sorted(epoch) == list(range(num_samples))
    assert num_samples > 5 * 12  # the ranks left in the first epoch
