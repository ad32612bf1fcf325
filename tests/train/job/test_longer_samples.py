"""A run goes on with longer samples: the losses of plain PyTorch, and each token once an epoch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.checkpoint import manifest
from phalanx.cli.main import main
from phalanx.config import BatchConfig, CorpusConfig, OptimizerConfig, Part, TrainConfig
from phalanx.config.law import check
from phalanx.config.load import load_config
from phalanx.data.batch import Batch
from phalanx.data.order import permute
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
    folder = tmp_path_factory.mktemp("parts")
    config = small_run(
        folder,
        num_lines=100,
        strategy="dp2",
        seed=SEED,
        steps=STEPS,
        save_every=FIRST,
        eval_samples=2,
        batch=BatchConfig(global_size=ROWS),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    train(config)
    return config


def longer(config: TrainConfig, out: Path, **settings: Any) -> TrainConfig:
    """Return the run that goes on from the first steps with long samples."""
    given = {
        "resume": str(manifest.folder_of(Path(config.out or ""), FIRST)),
        "out": str(out),
        "corpus": dataclasses.replace(config.corpus, seq_len=LONG),
    }
    return dataclasses.replace(config, **{**given, **settings})


# What should be, in lists.


def windows(num_places: int, seq_len: int) -> list[list[int]]:
    return [
        list(range(begin, min(begin + seq_len, num_places)))
        for begin in range(0, num_places, seq_len)
    ]


def in_order(samples: list[list[int]], epoch: int) -> list[list[int]]:
    return [samples[i] for i in permute(np.arange(len(samples)), len(samples), SEED, epoch)]


def cut_again(left: set[int], seq_len: int) -> list[list[int]]:
    """Return samples of the places that are left: of each stretch, then of the ends of all."""
    stretches: list[list[int]] = []
    for place in sorted(left):
        if stretches and stretches[-1][-1] == place - 1:
            stretches[-1].append(place)
        else:
            stretches.append([place])
    parts = [s[i : i + seq_len] for s in stretches for i in range(0, len(s), seq_len)]
    ends = [place for part in parts if len(part) < seq_len for place in part]
    joined = [ends[i : i + seq_len] for i in range(0, len(ends), seq_len)]
    return [part for part in parts if len(part) == seq_len] + joined


def batch_of(
    samples: list[list[int]], tokens: list[int], end: int, seq_len: int, row: int
) -> Batch:
    """Return a global batch; a document begins at each separator and where places do not follow."""
    made = torch.zeros(4, len(samples), seq_len, dtype=torch.int64)
    made[1] = IGNORE
    for number, places in enumerate(samples):
        document, position = 0, -1
        for at, place in enumerate(places):
            opens = at > 0 and (tokens[place] == end or place != places[at - 1] + 1)
            document, position = document + opens, 0 if opens else position + 1
            values = (tokens[place], tokens[place + 1], position, document)
            made[:, number, at] = torch.tensor(values)
        for at in range(len(places), seq_len):
            made[2:, number, at] = torch.tensor((position + 1 + at - len(places), document))
    return Batch(made[0], made[1], made[2], made[3], torch.arange(row, row + len(samples)))


def reference_batches(job: Job) -> tuple[list[Batch], int]:
    """Return the global batches of the whole run, and how many of them are of the first epoch."""
    file = job.tokens.train
    tokens, end = [int(token) for token in file.map()], file.end_id
    places = len(tokens) - 1
    short = in_order(windows(places, SHORT), 0)
    used = FIRST * ROWS
    left = {place for sample in short[used:] for place in sample}
    rest = in_order(cut_again(left, LONG), 0)
    stream = rest + in_order(windows(places, LONG), 1)
    batches = [batch_of(short[i : i + ROWS], tokens, end, SHORT, i) for i in range(0, used, ROWS)]
    num_long = (STEPS - FIRST) * ROWS
    batches += [
        batch_of(stream[i : i + ROWS], tokens, end, LONG, i) for i in range(0, num_long, ROWS)
    ]
    first_epoch = Counter(place for sample in short[:used] + rest for place in sample)
    assert first_epoch == Counter(range(places))
    joined = [sample for sample in rest if any(b != a + 1 for a, b in pairwise(sample))]
    assert len(rest) > ROWS and len(stream) >= num_long > len(rest)
    assert 0 < len(joined) < len(rest)
    return batches, len(joined)


def test_losses_are_those_of_plain_pytorch_on_the_same_samples(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, over what is left of an epoch and into the next; then alone, to the bit."""
    run = longer(config, tmp_path / "second", save_every=5)
    job = resolve(run)
    batches, num_joined = reference_batches(job)
    remark = remarks_on(job)[-1]
    assert f"begin after step {FIRST}; of epoch 1 " in remark
    assert f" {job.order.num_rest} samples, of which {num_joined} join" in remark
    case = decoder_case(job.shape, batches, SEED, config.optimizer, initial_decoder)
    expected = [float(r["loss"][""]) for r in ReferenceRun(case, torch.device("cpu")).steps()]
    assert losses(config.out)[:FIRST] == pytest.approx(expected[:FIRST], rel=1e-10)
    train(run)
    seen = losses(tmp_path / "second")
    assert seen == pytest.approx(expected[FIRST:], rel=1e-10)
    other = longer(config, tmp_path / "other", strategy="fsdp2", batch=BatchConfig(microbatch=2))
    train(other)
    assert losses(tmp_path / "other") == pytest.approx(expected[FIRST:], rel=1e-10)

    about = manifest.read(manifest.folder_of(tmp_path / "second", STEPS))
    assert about.parts == (Part(SHORT, SHORT, FIRST * ROWS),)
    assert about.consumed == (STEPS - FIRST) * ROWS and about.stream["corpus.seq_len"] == LONG
    (manifest.folder_of(tmp_path / "second", STEPS) / manifest.NAME).unlink()
    monkeypatch.chdir(tmp_path)
    again = resolved("--resume", "second")
    assert (again.start, again.parts) == (manifest.find_and_read(Path("second")), about.parts)
    assert "samples of" not in " ".join(remarks_on(again))
    assert main(["train", "--resume", "second"]) == 0
    assert losses("second")[-5:] == seen[-5:] and len(losses("second")) == len(seen) + 5


def resolved(*words: str) -> Job:
    config = load_config(words).config
    check(config)
    return resolve(config)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
def test_the_epochs_of_a_run_end_where_they_would(
    config: TrainConfig, tmp_path: Path, shuffle: bool, tail: Any
) -> None:
    corpus = dataclasses.replace(config.corpus, shuffle=shuffle, tail=tail)
    config = dataclasses.replace(config, corpus=corpus, steps=None, epochs=2, out=str(tmp_path))
    short = resolve(config)
    places = short.tokens.train.num_tokens - 1
    folder = manifest.folder_of(tmp_path, FIRST)
    folder.mkdir(parents=True)
    manifest.write(folder, manifest_of(short, FIRST, FIRST * ROWS))
    job = resolve(
        longer(config, tmp_path / "second", corpus=dataclasses.replace(corpus, seq_len=LONG))
    )
    left = -(-(places - FIRST * ROWS * SHORT) // LONG) + -(-places // LONG)
    rounded = left // ROWS if tail == "drop" else -(-left // ROWS)
    assert job.num_steps == FIRST + rounded < short.num_steps
    assert num_epochs(job) == pytest.approx(2, abs=ROWS * LONG / places)
    assert job.done == (FIRST, 0) and short.done == (0, 0)
    remark = remarks_on(job)[-1]
    assert ("join" in remark) == shuffle and ("text as it stands" in remark) != shuffle


def test_a_second_part_goes_on_to_a_third(config: TrainConfig, tmp_path: Path) -> None:
    """Also at the end of an epoch, and with a longest row that was raised for it."""
    job = resolve(longer(config, tmp_path / "second"))
    first = job.order.num_rest
    for consumed, number in ((7, 1), (first, 1), (first + 3, 2)):
        folder = manifest.folder_of(tmp_path / str(consumed), FIRST + 1)
        folder.mkdir(parents=True)
        manifest.write(folder, manifest_of(job, FIRST + 1, consumed))
        corpus = dataclasses.replace(config.corpus, seq_len=2 * LONG)
        shape = dataclasses.replace(SHAPE, max_seq_len=2 * LONG)
        third = resolve(
            longer(config, tmp_path / "third", corpus=corpus, shape=shape, resume=str(folder))
        )
        assert third.parts == (*job.parts, Part(LONG, LONG, consumed))
        assert third.order.first_epoch == number
        assert (third.samples.rest is None) == (consumed == first)
        assert third.shape.max_seq_len == 2 * LONG
        words = " ".join(remarks_on(third))
        assert "corpus.seq_len 48 -> 96" in words
        assert ("with epoch 2" in words) == (consumed == first)


CORPUS: Any = {
    "longer than positions": {"seq_len": 65},
    "shorter": {"seq_len": 12},
    "kept together": {"seq_len": SHORT, "shuffle_len": LONG},
    "no multiple": {"seq_len": LONG, "shuffle_len": 120},
    "in file order": {"seq_len": LONG, "shuffle": False},
    "both": {"seq_len": LONG, "shuffle": False, "shuffle_len": LONG},
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("longer than positions", r"corpus.seq_len is 65, but the model's positions end at 64; set "
         r"corpus.seq_len to at most 64, or shape.max_seq_len higher"),
        ("shorter", r"corpus.seq_len is 12, but this run was made with 24 and samples can only "
         r"become longer; leave it out, or begin another run with its weights: --init"),
        ("kept together", "corpus.shuffle_len is 48, but this run was made with None; leave it ou"),
        ("no multiple", r"corpus.shuffle_len is 120, but whole samples stay together, of "
         r"corpus.seq_len 48 tokens each; the nearest is 96"),
        ("in file order", "corpus.shuffle is False, but this run was made with True"),
        ("both", "corpus.shuffle_len is 48, but corpus.shuffle is false"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(
    config: TrainConfig, tmp_path: Path, name: str, fault: str
) -> None:
    corpus = dataclasses.replace(config.corpus, **CORPUS[name])
    with pytest.raises((CheckpointError, ConfigError), match=fault):
        resolve(longer(config, tmp_path / "second", corpus=corpus))


def test_a_learned_table_of_positions_cannot_grow(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, num_kv_heads=2, vocab_size=300, max_seq_len=32)
    config = small_run(
        tmp_path, model="gpt2-124m", strategy="dp1", steps=4, shape=shape, num_lines=100
    )
    job = resolve(config)
    folder = manifest.folder_of(tmp_path / "run", FIRST)
    folder.mkdir(parents=True)
    manifest.write(folder, manifest_of(job, FIRST, FIRST * ROWS))
    with pytest.raises(ConfigError, match=r"positions end at 32; set .*most 32, as many as it has"):
        resolve(longer(config, tmp_path / "second"))
    raised = longer(config, tmp_path / "second", shape=dataclasses.replace(shape, max_seq_len=LONG))
    with pytest.raises(
        CheckpointError, match=r"max_seq_len is 48, but .* a table of 32 pos.*ost 32"
    ):
        resolve(raised)
    longest = dataclasses.replace(config.corpus, seq_len=32)
    assert resolve(longer(config, tmp_path / "second", corpus=longest)).parts


def test_what_shuffling_keeps_together_is_the_longer_sample(tmp_path: Path) -> None:
    corpus = CorpusConfig(
        seq_len=8, shuffle_len=LONG, cache=str(tmp_path / "cache"), validation=0.1
    )
    config = small_run(
        tmp_path, strategy="dp1", steps=4, corpus=corpus, batch=BatchConfig(global_size=6)
    )
    job = resolve(config)
    folder = manifest.folder_of(tmp_path / "run", FIRST)
    folder.mkdir(parents=True)
    manifest.write(folder, manifest_of(job, FIRST, 6 * FIRST))
    for shuffle_len in (LONG, None):
        corpus = dataclasses.replace(corpus, seq_len=LONG, shuffle_len=shuffle_len)
        long = resolve(longer(config, tmp_path / "second", corpus=corpus))
        assert long.parts == (Part(8, LONG, 6 * FIRST),)
        assert remarks_on(long)[-1].endswith(f" {long.order.num_rest} samples of text as it stands")


@pytest.mark.parametrize("part", [[1, 8, 3], [0, 0, 0], [16, 8, 3], ["8", 8, 3], [8, 8]])
def test_parts_that_no_run_had_are_refused(
    config: TrainConfig, tmp_path: Path, part: list[Any]
) -> None:
    job = resolve(longer(config, tmp_path / "second"))
    folder = manifest.folder_of(tmp_path / "run", FIRST)
    folder.mkdir(parents=True)
    about: Any = {"parts": (part,)}
    manifest.write(folder, dataclasses.replace(manifest_of(job, FIRST, 5), **about))
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest.json"):
        resolve(longer(config, tmp_path / "third", resume=str(tmp_path / "run")))
