"""A run resumes with samples of another length: a new epoch, with the losses of plain PyTorch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.checkpoint import manifest
from phalanx.config import BatchConfig, OptimizerConfig, TrainConfig
from phalanx.data.order import permute
from phalanx.data.samples import Batch
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models.loss import IGNORE
from phalanx.train.job.resolve import Job, manifest_of, num_epochs, remarks_on, resolve
from phalanx.train.run import train
from phalanx.verify.cases import decoder_case, initial_decoder
from phalanx.verify.reference import ReferenceRun
from small_run import SHAPE, losses, small_run

SEED, ROWS, SHORT, LONG = 5, 8, 24, 48
STEPS, FIRST = 10, 3
"""Steps of the whole run, and of them those with short samples."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of short samples that has saved after its first steps."""
    config = small_run(
        tmp_path_factory.mktemp("short"),
        num_lines=100,
        strategy="dp2",
        seed=SEED,
        steps=STEPS,
        save=f"every={FIRST}",
        eval_samples=2,
        batch=BatchConfig(global_size=ROWS),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    train(config)
    return config


def resumed(config: TrainConfig, out: Path, seq_len: int = LONG, **settings: Any) -> TrainConfig:
    """Return the run that resumes after the first steps with samples of another length."""
    given = {
        "resume": str(manifest.folder_of(Path(config.out or ""), FIRST)),
        "out": str(out),
        "corpus": dataclasses.replace(config.corpus, seq_len=seq_len),
    }
    return dataclasses.replace(config, **{**given, **settings})


def batches_of(job: Job, seq_len: int, epoch: int, num_steps: int) -> list[Batch]:
    """Return the first global batches from an epoch on, made of lists."""
    file = job.tokens.train
    tokens = [int(token) for token in file.map()]
    windows = [tokens[i : i + seq_len + 1] for i in range(0, len(tokens) - 1, seq_len)]
    epochs = [permute(np.arange(len(windows)), len(windows), SEED, epoch + n) for n in (0, 1)]
    order = np.concatenate(epochs)
    batches: list[Batch] = []
    for begin in range(0, num_steps * ROWS, ROWS):
        made = torch.zeros(4, ROWS, seq_len, dtype=torch.int64)
        made[1] = IGNORE
        for row, sample in enumerate(order[begin : begin + ROWS]):
            window, document, position = windows[sample], 0, -1
            for at in range(seq_len):
                is_opened = 0 < at < len(window) - 1 and window[at] == file.end_id
                document, position = document + is_opened, 0 if is_opened else position + 1
                made[2:, row, at] = torch.tensor((position, document))
                if at + 1 < len(window):
                    made[:2, row, at] = torch.tensor((window[at], window[at + 1]))
        rows = torch.arange(begin, begin + ROWS)
        batches.append(Batch(made[0], made[1], made[2], made[3], rows))
    return batches


@pytest.mark.slow
def test_a_new_length_begins_a_new_epoch_with_the_losses_of_plain_pytorch(
    config: TrainConfig, tmp_path: Path
) -> None:
    """Then the run resumes by itself, to the bit."""
    run = resumed(config, tmp_path / "second", save="every=5")
    job = resolve(run)
    assert remarks_on(job)[-1] == "after step 3, samples have 48 tokens and epoch 2 starts"
    batches = batches_of(job, SHORT, 0, FIRST) + batches_of(job, LONG, 1, STEPS - FIRST)
    case = decoder_case(job.shape, batches, SEED, config.optimizer, initial_decoder)
    expected = [float(r["loss"][""]) for r in ReferenceRun(case, torch.device("cpu")).steps()]
    assert losses(config.out)[:FIRST] == pytest.approx(expected[:FIRST], rel=1e-10)
    train(run)
    seen = losses(tmp_path / "second")
    assert seen == pytest.approx(expected[FIRST:], rel=1e-10)

    about = manifest.read(manifest.folder_of(tmp_path / "second", STEPS))
    assert (about.first_epoch, about.consumed) == (1, (STEPS - FIRST) * ROWS)
    again = resumed(
        run, tmp_path / "again", resume=str(tmp_path / "second/checkpoints/step-00000005")
    )
    train(again)
    assert losses(tmp_path / "again") == seen[-5:]


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
def test_epochs_count_the_interrupted_one(config: TrainConfig, tmp_path: Path, tail: Any) -> None:
    corpus = dataclasses.replace(config.corpus, tail=tail, seq_len=LONG)
    job = resolve(resumed(config, tmp_path, corpus=corpus, steps=None, epochs=2))
    rows = -(-(job.tokens.train.num_tokens - 1) // LONG)
    assert job.num_steps == FIRST + (rows // ROWS if tail == "drop" else -(-rows // ROWS))
    assert num_epochs(job) == pytest.approx(2, abs=ROWS / rows)
    assert job.done == (FIRST, 0)


@pytest.mark.parametrize("seq_len", [LONG // 3, 2 * LONG])
def test_a_third_length_begins_the_epoch_after(
    config: TrainConfig, tmp_path: Path, seq_len: int
) -> None:
    """Samples may become shorter again; at the end of an epoch nothing is left out."""
    job = resolve(resumed(config, tmp_path / "second"))
    for consumed, number in ((0, 1), (7, 2), (job.order.num_samples, 2)):
        folder = manifest.folder_of(tmp_path / f"{consumed}", FIRST + 1)
        folder.mkdir(parents=True)
        manifest.write(folder, manifest_of(job, FIRST + 1, consumed))
        shape = dataclasses.replace(SHAPE, max_seq_len=2 * LONG)
        third = resolve(
            resumed(config, tmp_path / "third", seq_len, shape=shape, resume=str(folder))
        )
        assert third.order.first_epoch == number
        assert f"corpus.seq_len 48 -> {seq_len}" in " ".join(remarks_on(third))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"seq_len": 65},
            r"corpus.seq_len is 65, but the model's positions end at 64; set corpus.seq_len to at "
            r"most 64, or raise shape.max_seq_len",
        ),
        (
            {"seq_len": LONG, "shuffle": False},
            "corpus.shuffle is False, but this run was made with True",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    config: TrainConfig, tmp_path: Path, settings: dict[str, Any], fault: str
) -> None:
    corpus = dataclasses.replace(config.corpus, **settings)
    with pytest.raises((CheckpointError, ConfigError), match=fault):
        resolve(resumed(config, tmp_path / "second", corpus=corpus))


def test_a_learned_table_of_positions_cannot_grow(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, num_kv_heads=2, vocab_size=300, max_seq_len=32)
    config = small_run(
        tmp_path, model="gpt2-124m", strategy="dp1", steps=4, shape=shape, num_lines=100
    )
    folder = manifest.folder_of(tmp_path / "run", FIRST)
    folder.mkdir(parents=True)
    manifest.write(folder, manifest_of(resolve(config), FIRST, FIRST * ROWS))
    with pytest.raises(ConfigError, match=r"positions end at 32; set .*most 32, the size of its l"):
        resolve(resumed(config, tmp_path / "second"))
    raised = dataclasses.replace(shape, max_seq_len=LONG)
    with pytest.raises(
        CheckpointError, match=r"max_seq_len is 48, but .* table of 32 positions.*ost 32"
    ):
        resolve(resumed(config, tmp_path / "second", shape=raised))
    assert resolve(resumed(config, tmp_path / "second", 32)).order.first_epoch == 1


def test_manifests_of_an_earlier_version_are_read(config: TrainConfig, tmp_path: Path) -> None:
    """They kept the lengths of the samples; an order of theirs that is gone is refused."""
    folder = manifest.folder_of(tmp_path, FIRST)
    folder.mkdir(parents=True)
    about = manifest_of(resolve(resumed(config, tmp_path / "out", SHORT)), FIRST, FIRST * ROWS)
    values = dataclasses.asdict(about)
    del values["first_epoch"]
    stream = {**values["stream"], "corpus.shuffle_len": None}
    write(folder, {**values, "stream": stream, "parts": []})
    assert manifest.read(folder) == dataclasses.replace(about, stream=stream)
    again = resumed(config, tmp_path / "second", SHORT, resume=str(folder))
    write(folder, {**values, "stream": {**stream, "corpus.shuffle_len": LONG}, "parts": []})
    with pytest.raises(CheckpointError, match=r"made with corpus.shuffle_len 48, an order"):
        resolve(again)
    # The rest of the epoch in which they changed came first, which nothing here can tell.
    write(folder, {**values, "stream": stream, "parts": [[12, 12, 40]]})
    with pytest.raises(CheckpointError, match=r"length of its samples within an epoch, an order"):
        resolve(again)
    write(folder, {**values, "stream": [], "parts": [[12, 12, 40]]})
    with pytest.raises(CheckpointError, match="stream"):
        manifest.read(folder)


def write(folder: Path, values: dict[str, Any]) -> None:
    """Write a manifest of given values, with their checksum."""
    values = {**values, "sha256": manifest._sha256(values)}
    (folder / manifest.NAME).write_text(json.dumps(values))
