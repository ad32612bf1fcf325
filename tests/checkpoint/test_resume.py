"""A run that stops and goes on: the same losses to the bit, and each sample once per epoch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.checkpoint import manifest
from phalanx.config import BatchConfig, CorpusConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.data.order import Order
from phalanx.data.samples import Samples
from phalanx.launch.local import run_ranks
from phalanx.train.job import Job, resolve
from phalanx.train.loop import train
from phalanx.train.session import open_session


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("resume")
    text = "".join(f"The square of {n} is {n * n}, and its cube {n**3}.\n" for n in range(150))
    (folder / "squares.txt").write_text(text)
    return TrainConfig(
        data=str(folder / "squares.txt"),
        precision="float64",
        device="cpu",
        steps=24,
        seed=5,
        threads=1,
        save_every=4,
        keep_checkpoints=6,
        eval_every=0,
        eval_samples=2,
        shape=ShapeConfig(
            num_layers=2, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn=24,
            vocab_size=301, max_seq_len=32, tied=True, dropout=0.1,
        ),
        corpus=CorpusConfig(seq_len=24, cache=str(folder / "cache"), validation=0.1),
        batch=BatchConfig(global_size=12),
        optimizer=OptimizerConfig(lr=1e-2),
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


STRATEGIES = ["dp2", "fsdp2", "fsdp2:zero2", "fsdp2:zero1", "dp2,fsdp2"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_next_twenty_losses_are_the_same(
    config: TrainConfig, tmp_path: Path, strategy: str
) -> None:
    """Bit for bit on the same strategy, within rounding on the others."""
    whole = tmp_path / "whole"
    train(dataclasses.replace(config, strategy=strategy, out=str(whole)))
    expected = losses(whole)[4:]
    assert len(expected) == 20
    middle = str(manifest.folder_of(whole, 4))
    others = {"dp2": "fsdp3", "fsdp2": "dp1", "dp2,fsdp2": "fsdp2:zero1"}
    for again in (strategy, others.get(strategy, "dp2")):
        part = tmp_path / again
        train(dataclasses.replace(config, resume=middle, strategy=again, out=str(part)))
        if again == strategy:
            assert losses(part) == expected
        else:
            assert losses(part) == pytest.approx(expected, rel=1e-10)
    kept = sorted(manifest.whole(part))
    assert kept == [8, 12, 16, 20, 24]


def take_steps(job: Job, num_steps: int) -> list[int]:
    """Take steps and save; return the rows of the global order that this rank had."""
    session = open_session(job)
    rows: list[int] = []
    with session.loader, session.saver:
        for _ in range(num_steps):
            microbatches = next(session.loader)
            rows += [int(row) for batch in microbatches for row in batch.rows_B if row >= 0]
            session.trainer.step(microbatches)
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
