"""What is decided and refused before the first process starts."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.account.parameters import num_parameters
from phalanx.checkpoint import manifest
from phalanx.cli.main import main
from phalanx.config import BatchConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.data import corpus
from phalanx.errors import BatchError, CheckpointError, ConfigError
from phalanx.hugging_face.companions import TOKENIZER, keep_tokenizer
from phalanx.launch.agreement import check_same
from phalanx.train.job.request import choose_strategy, settle
from phalanx.train.job.resolve import (
    DEFAULT_STEPS,
    complete,
    facts_of,
    manifest_of,
    remarks_on,
    resolve,
    words_of,
)
from phalanx.train.job.run_folder import checkpoint_bytes
from phalanx.train.precision import resolve as resolve_precision
from phalanx.train.run import train
from small_run import SHAPE, small_run


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A small run, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    return small_run(
        tmp_path,
        data="squares.txt",
        precision="float32",
        strategy="dp1",
        steps=4,
        out="run",
        shape=dataclasses.replace(SHAPE, dropout=None),
        batch=BatchConfig(global_size=4),
    )


def with_checkpoints(config: TrainConfig, *steps: int) -> Path:
    """Write manifests into the run's folder, as if it had saved."""
    job = resolve(config)
    for steps_done in steps:
        folder = manifest.folder_of(job.out, steps_done)
        folder.mkdir(parents=True)
        manifest.write(folder, manifest_of(job, steps_done, 4 * steps_done))
    return job.out


def test_resolving_leaves_no_folder(config: TrainConfig, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    resolve(config)
    job = resolve(dataclasses.replace(config, out=None))
    assert job.out.parts[0] == "runs"
    resolve(dataclasses.replace(config, out=str(tmp_path / "a" / "b" / "c")))
    assert sorted(p for p in tmp_path.iterdir() if p.name != "cache") == before


def test_a_folder_that_cannot_be_made_is_refused(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"cannot write to squares.txt/run: .*another --out"):
        resolve(dataclasses.replace(config, out="squares.txt/run"))


def test_a_used_folder_is_refused_to_a_fresh_run(config: TrainConfig) -> None:
    with_checkpoints(config, 2, 3)
    with pytest.raises(ConfigError, match=r"run holds checkpoints of another run.*step 3.*--resum"):
        resolve(config)
    with_checkpoints(dataclasses.replace(config, out="other"), 4)
    with pytest.raises(ConfigError, match="other holds checkpoints of another run"):
        resolve(dataclasses.replace(config, resume="run", out="other"))


def test_a_step_that_is_not_the_last_goes_on_only_elsewhere(config: TrainConfig) -> None:
    run = with_checkpoints(config, 2, 3)
    early = dataclasses.replace(config, resume=str(manifest.folder_of(run, 2)), out=None)
    with pytest.raises(ConfigError, match=r"from step 2, but .*run .*step 3.*000003, or remove it"):
        resolve(early)
    assert resolve(dataclasses.replace(early, out="elsewhere")).out == Path("elsewhere")
    job = resolve(dataclasses.replace(config, resume="run", out=None))
    assert job.out == Path("run")
    assert job.start is not None and job.start.about.steps_done == 3


def test_a_checkpoint_that_its_run_has_removed_meanwhile_is_not_resumed(
    config: TrainConfig,
) -> None:
    """The old job of the run saves its last checkpoint after the one to resume from is found."""
    run = with_checkpoints(config, 2)
    settled = settle(dataclasses.replace(config, resume="run", out=None))
    manifest.folder_of(run, 2).rename(manifest.folder_of(run, 3))
    with pytest.raises(ConfigError, match=r"000002, .*no longer exists; .*000003; start again"):
        complete(settled)


def test_resume_from_inside_the_step_folder(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_checkpoints(config, 2)
    inside = dataclasses.replace(config, data=str(tmp_path / "squares.txt"), resume=".", out=None)
    monkeypatch.chdir(manifest.folder_of(run, 2))
    assert resolve(inside).out == tmp_path / "run"


def test_a_checkpoint_on_its_own_must_be_told_where_to_go_on(config: TrainConfig) -> None:
    run = with_checkpoints(config, 2)
    shutil.copytree(manifest.folder_of(run, 2), "moved")
    with pytest.raises(ConfigError, match="resume by --out"):
        resolve(dataclasses.replace(config, resume="moved", out=None))
    assert resolve(dataclasses.replace(config, resume="moved", out="new")).out == Path("new")


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_all_checkpoints_must_fit_on_the_disk(
    config: TrainConfig, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"save": "every=2,minutes=0", "precision": precision}
    config = dataclasses.replace(config, **settings)
    shape = resolve(config).shape
    one_bytes = checkpoint_bytes(shape, resolve_precision(precision, "cpu"))
    assert one_bytes == (12 if precision == "float32" else 24) * num_parameters(shape).total
    free = SimpleNamespace(free=2 * one_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    resolve(config)
    free.free -= 1
    with pytest.raises(ConfigError, match=r"checkpoints \(2, of .*another --out"):
        resolve(config)


def test_with_old_ones_removed_one_more_than_kept_must_fit(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, steps=12, save="every=2,minutes=0")
    one_bytes = checkpoint_bytes(resolve(config).shape, resolve_precision("float32", "cpu"))
    free = SimpleNamespace(free=4 * one_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    resolve(dataclasses.replace(config, save=f"{config.save},keep=3"))
    with pytest.raises(ConfigError, match=r"checkpoints \(5, of .*keep=NUMBER"):
        resolve(dataclasses.replace(config, save=f"{config.save},keep=4"))
    with pytest.raises(ConfigError, match=r"checkpoints \(6, of "):
        resolve(config)


def test_one_checkpoint_by_the_clock_must_fit_beside_the_others(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_bytes = checkpoint_bytes(resolve(config).shape, resolve_precision("float32", "cpu"))
    free = SimpleNamespace(free=2 * one_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ConfigError, match=r"checkpoints \(2, of .*\(minutes=0\)"):
        resolve(config)
    free.free += 1
    resolve(config)
    free.free -= one_bytes
    resolve(dataclasses.replace(config, save="minutes=0"))


def test_the_estimate_of_a_checkpoint_is_near_its_size(config: TrainConfig) -> None:
    wide = dataclasses.replace(config.shape, hidden=128, ffn=512, vocab_size=2048)
    config = dataclasses.replace(config, steps=1, precision="float64", shape=wide)
    train(config)
    files = manifest.find(Path("run")).iterdir()
    estimate = checkpoint_bytes(
        resolve(dataclasses.replace(config, out=None)).shape, resolve_precision("float64", "cpu")
    )
    assert sum(path.stat().st_size for path in files) == pytest.approx(estimate, rel=0.05)


def test_float16_on_a_cpu_is_refused_before_any_process(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="the nearest is bfloat16"):
        resolve(dataclasses.replace(config, precision="float16"))


def test_nproc_must_be_what_torchrun_started(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    two = dataclasses.replace(config, strategy=None, nproc=2)
    assert choose_strategy(two)[0].num_ranks == 2
    with pytest.raises(ConfigError, match=r"nproc is 4, but torchrun has started 2.*set it to 2"):
        choose_strategy(dataclasses.replace(two, nproc=4))


def test_more_processes_than_the_host_can_hold_are_refused(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    del config
    for words in ("train --strategy fsdp1000000 --device cpu", "verify dp1000000"):  # at once
        assert main(words.split()) == 2
        text = " ".join(capsys.readouterr().err.split())
        assert re.search(r"1000000 processes take at least 97656\.2 GiB, .*, enough for \d+;", text)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--steps 1e19", r"steps is '1e19'"),
        ("--steps 10000000000000000000", r"steps is 1\d+; .*; the nearest is 1099511627776"),
        ("--batch.microbatch 100000000000", r"batch.microbatch is 1\d+; .*nearest is 1048576"),
        ("--threads 100000", r"threads is 100000; .*nearest is 4096"),
        ("--timeout-s 1e15", r"timeout_s is 1000000000000000\.0; .*nearest is 1000000"),
        ("--steps 0", r"steps is 0; expected at least 1; the nearest is 1"),
    ],
)
def test_numbers_that_no_run_can_have_are_refused(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *option.split()]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))


def test_a_seed_that_verify_cannot_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("verify dp1 --seed 99999999999999999999".split()) == 2
    assert "seed is 99999999999999999999; expected a number in [0, " in capsys.readouterr().err


def test_warm_up_must_end_before_the_run(config: TrainConfig) -> None:
    resolve(dataclasses.replace(config, optimizer=OptimizerConfig(warmup_steps=3)))
    for steps, warmup_steps in ((4, 4), (None, DEFAULT_STEPS)):
        long = dataclasses.replace(
            config, steps=steps, optimizer=OptimizerConfig(warmup_steps=warmup_steps)
        )
        with pytest.raises(ConfigError, match=f"the nearest is {warmup_steps - 1}"):
            resolve(long)


def test_the_length_of_a_run_that_names_none(config: TrainConfig) -> None:
    assert resolve(dataclasses.replace(config, steps=None)).num_steps == DEFAULT_STEPS


def test_the_tokenizer_of_a_run_is_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kept = tmp_path / "cached.json", tmp_path / TOKENIZER
    source.write_text("first")
    keep_tokenizer(source, tmp_path)
    assert kept.read_text() == "first"
    source.write_text("second")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        keep_tokenizer(source, tmp_path)
    assert kept.read_text() == "first"
    source.write_text("first")
    keep_tokenizer(source, tmp_path)  # nothing is written where the same is there
    monkeypatch.undo()
    source.write_text("third")
    keep_tokenizer(source, tmp_path)
    assert kept.read_text() == "third"
    assert {path.name for path in tmp_path.iterdir()} == {source.name, TOKENIZER}


# What a resumed run takes from its checkpoint.


def test_a_run_goes_on_for_as_long_and_in_the_batch_it_was_begun_with(config: TrainConfig) -> None:
    config = dataclasses.replace(config, steps=9, batch=BatchConfig(global_size=12, microbatch=6))
    with_checkpoints(config, 2)
    bare = dataclasses.replace(config, steps=None, batch=BatchConfig(), resume="run", out=None)
    job = resolve(bare)
    assert job.num_steps == job.config.steps == 9
    assert str(job.batch) == "global batch 12 = microbatch 6 x accumulation 2 x 1 data ranks"
    assert remarks_on(job) == []
    for strategy, microbatch, accumulation in (("dp2", 6, 1), ("dp3", 4, 1), ("fsdp6", 2, 1)):
        batch = resolve(dataclasses.replace(bare, strategy=strategy)).batch
        assert (batch.global_size, batch.microbatch, batch.accumulation) == (
            12, microbatch, accumulation,
        )  # fmt: skip
    with pytest.raises(BatchError, match=r"12 sequences, .* by 5 .* strategy with 4 .*-size 15"):
        resolve(dataclasses.replace(bare, strategy="dp5"))
    for given in (BatchConfig(microbatch=3), BatchConfig(accumulation=4)):  # of the run's batch
        job = resolve(dataclasses.replace(bare, batch=given))
        assert (job.batch.global_size, job.batch.microbatch) == (12, 3)
    with pytest.raises(BatchError, match=r"batch.global_size is 12, but .* of microbatch 5 x 1"):
        resolve(dataclasses.replace(bare, batch=BatchConfig(microbatch=5)))
    job = resolve(dataclasses.replace(bare, batch=BatchConfig(microbatch=5, accumulation=2)))
    assert job.batch.global_size == 10
    job = resolve(dataclasses.replace(bare, steps=20, batch=BatchConfig(global_size=5)))
    assert (job.num_steps, job.batch.global_size) == (20, 5)
    with_checkpoints(dataclasses.replace(config, steps=None, epochs=1.5, out="epochs"), 2)
    job = resolve(dataclasses.replace(bare, resume="epochs"))
    assert job.config.epochs == 1.5
    assert (
        job.num_steps == resolve(dataclasses.replace(bare, resume="epochs", epochs=1.5)).num_steps
    )


def test_the_configuration_of_a_run_that_goes_on_is_shown(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with_checkpoints(dataclasses.replace(config, steps=9), 2)
    words = (
        "train --resume run --strategy dp2 --device cpu --corpus.seq-len 16 --show-config --json"
    )
    assert main(words.split()) == 0
    shown = json.loads(capsys.readouterr().out)
    taken = {key: shown["config"]["batch"][key] for key in ("global_size", "microbatch")}
    assert (shown["config"]["steps"], taken) == (9, {"global_size": 4, "microbatch": 2})
    folder = "run/checkpoints/step-00000002"
    assert [key for key, source in shown["sources"].items() if source == folder] == [
        "steps", "batch.global_size", "batch.microbatch",
    ]  # fmt: skip


def test_settings_other_than_the_run_had_are_named(config: TrainConfig) -> None:
    with_checkpoints(config, 2)
    resumed = dataclasses.replace(config, resume="run", out=None)
    assert remarks_on(resolve(resumed)) == []
    other = dataclasses.replace(
        resumed,
        steps=8,
        precision="float64",
        batch=BatchConfig(global_size=8),
        shape=dataclasses.replace(config.shape, dropout=0.1),
        corpus=dataclasses.replace(config.corpus, document_mask=False),
        optimizer=OptimizerConfig(lr=1e-4, clip_p=float("inf")),
    )
    assert remarks_on(resolve(other)) == [
        "resumes with changed settings: steps 4 -> 8, precision float32 -> float64, "
        "corpus.document_mask True -> False, batch.global_size 4 -> 8, optimizer.lr 0.002 -> "
        "0.0001, optimizer.clip_p 2.0 -> inf, shape.dropout 0.0 -> 0.1"
    ]
    (line,) = remarks_on(resolve(dataclasses.replace(resumed, strategy="fsdp2", save="every=3")))
    assert line.endswith("settings: strategy dp1 -> fsdp2, save minutes=10 -> every=3,minutes=10")


def test_that_nothing_is_left_is_said(config: TrainConfig) -> None:
    with_checkpoints(config, 4)
    (line,) = remarks_on(resolve(dataclasses.replace(config, resume="run", steps=None, out=None)))
    assert line.startswith(
        "nothing left to do: the checkpoint is after step 4, and the run has 4 steps"
    )


def test_that_a_run_goes_back_is_said(config: TrainConfig) -> None:
    with_checkpoints(config, 2, 4)
    (Path("run") / "checkpoints" / "step-00000004" / manifest.NAME).unlink()
    (line,) = remarks_on(resolve(dataclasses.replace(config, resume="run", out=None)))
    assert line == (
        "resumes from step-00000002: step-00000004 has no manifest.json, so not all was saved"
    )


def test_a_run_is_called_what_it_is(config: TrainConfig) -> None:
    """A preset by its name, other sizes by theirs, and later runs as the one they come from."""
    with_checkpoints(config, 2)
    job = resolve(dataclasses.replace(config, out=None))
    assert job.name == "decoder-6.77k" and num_parameters(job.shape).total == 6768
    assert job.out.name.startswith("decoder-6.77k-dp1-")
    assert resolve(dataclasses.replace(config, resume="run", out=None)).name == job.name
    demo = dataclasses.replace(config, shape=ShapeConfig(dropout=0.5), out=None)
    assert resolve(demo).name == "demo"
    assert not list(Path("run").glob(TOKENIZER))
    shutil.copy(job.tokens.tokenizer, "run")
    begun = dataclasses.replace(config, init="run", shape=ShapeConfig(dropout=0.2), out=None)
    job = resolve(begun)
    assert job.name == "decoder-6.77k" and job.out.name.startswith("decoder-6.77k-dp1-")
    assert words_of(job)[0].startswith("decoder-6.77k (6,768 parameters) from run/checkpoints/step")
    with_checkpoints(dataclasses.replace(begun, out="second"), 3)
    again = resolve(dataclasses.replace(begun, init=None, resume="second"))
    assert again.name == job.name and again.shape == job.shape and again.shape.dropout == 0.2


def test_a_preset_that_is_named_must_be_that_of_the_weights(config: TrainConfig) -> None:
    run = with_checkpoints(config, 2)
    shutil.copy(resolve(dataclasses.replace(config, out=None)).tokens.tokenizer, run)
    with pytest.raises(ConfigError, match=r"init is run, weights .*, but model demo with the giv"):
        resolve(dataclasses.replace(config, model="demo", shape=ShapeConfig(), init="run"))
    with pytest.raises(CheckpointError, match="another model: its vocab_size is 300"):
        named = dataclasses.replace(config, model="demo", shape=ShapeConfig(), resume="run")
        resolve(named)


def test_weights_without_a_tokenizer_are_refused(config: TrainConfig) -> None:
    with_checkpoints(config, 2)
    begun = dataclasses.replace(config, init="run", out="new")
    with pytest.raises(ConfigError, match=r"init is run, which has no tokenizer.json.*--tokenizer"):
        resolve(begun)
    resolve(dataclasses.replace(begun, corpus=dataclasses.replace(config.corpus, vocab_size=280)))


def test_the_checkpoints_that_are_there_need_no_more_room(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, steps=12, save="every=2,minutes=0,keep=3")
    one_bytes = checkpoint_bytes(resolve(config).shape, resolve_precision("float32", "cpu"))
    with_checkpoints(config, 2, 4)
    resumed = dataclasses.replace(config, resume="run")
    free = SimpleNamespace(free=2 * one_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    resolve(resumed)
    free.free = 1
    with pytest.raises(ConfigError, match=r"checkpoints \(2, of "):
        resolve(resumed)
    with pytest.raises(ConfigError, match=r"checkpoints \(1, of "):
        resolve(dataclasses.replace(resumed, save="every=2,minutes=0,keep=1"))


# What hosts compare that have each resolved the job.


def test_hosts_compare_every_setting_that_changes_the_run(config: TrainConfig) -> None:
    Path("other").mkdir()
    shutil.copy("squares.txt", "other")
    own = {
        "data": "other/squares.txt",
        "threads": 3,
        "out": "elsewhere",
        "steps": None,
        "epochs": None,
    }
    base = dataclasses.replace(config, steps=None)
    assert facts_of(resolve(base)) == facts_of(
        resolve(dataclasses.replace(base, **own, nproc=1, precision="float32"))
    )
    for key, other in {
        "optimizer.lr": dataclasses.replace(base, optimizer=OptimizerConfig(lr=1e-5)),
        "shape.dropout": dataclasses.replace(
            base, shape=dataclasses.replace(base.shape, dropout=0.5)
        ),
        "corpus.document_mask": dataclasses.replace(
            base, corpus=dataclasses.replace(base.corpus, document_mask=False)
        ),
        "precision": dataclasses.replace(base, precision="float64"),
        "save": dataclasses.replace(base, save="every=2"),
        "nonfinite": dataclasses.replace(base, nonfinite="skip"),
    }.items():
        ours, theirs = facts_of(resolve(base)), facts_of(resolve(other))
        assert [name for name in ours if ours[name] != theirs[name]] == [key]
        with pytest.raises(ConfigError, match=f"they differ in {key} "):
            check_same([ours, theirs])


# What is said before the first step.


def test_the_data_and_how_often_it_is_gone_through_is_said(config: TrainConfig) -> None:
    job = resolve(config)
    size = Path("squares.txt").stat().st_size
    line = words_of(job)[1]
    assert line.startswith(
        f"data: {Path('squares.txt').absolute()}: {size:,} bytes in 1 document, "
    )
    assert f"{job.tokens.train.num_tokens:,} tokens to train on" in line
    assert line.endswith("; 4 steps are 0.047 epochs") and remarks_on(job) == []
    long = resolve(dataclasses.replace(config, steps=1000))
    (line,) = remarks_on(long)
    assert line.startswith("1000 steps are 12 epochs of this text; beyond about 4")
    assert line.endswith("--epochs 4 are 339 steps")
    assert resolve(dataclasses.replace(config, steps=None, epochs=4)).num_steps == 339
    assert remarks_on(resolve(dataclasses.replace(config, steps=None, epochs=12))) == []


def test_a_mixture_says_how_often_each_source_is_read(config: TrainConfig) -> None:
    (Path("code")).mkdir()
    Path("code/a.py").write_text("x = 1\n" * 400)
    Path("code/a.rst").write_text("not read")
    mixed = dataclasses.replace(config, data="0.75*squares.txt,0.25*code", steps=300)
    job = resolve(mixed)
    big, small = (order.num_samples for order in job.order.sources)
    assert job.order.num_samples == big + small == len(job.samples)
    here = Path.cwd()
    assert job.config.data == f"0.75*{here}/squares.txt,0.25*{here}/code"
    line, times = words_of(job)[1], [1200 * 0.75 / big, 1200 * 0.25 / small]
    assert times[0] < 4 < times[1]
    assert line.endswith(
        f"(squares.txt is read {times[0]:.2g} times, code is read {times[1]:.2g} times)"
    )
    assert "(left out: 1 file of unknown format (a.rst))" in line
    (remark,) = remarks_on(job)
    assert remark.startswith(f"code is read {times[1]:.2g} times; beyond about 4 a model")
    with_checkpoints(mixed, 2)
    resumed = dataclasses.replace(mixed, resume="run", out="second")
    assert resolve(resumed).order == job.order
    others: dict[str, TrainConfig] = {
        r"mixture is \[1, 1\], but this run was made with \[3, 1\]": dataclasses.replace(
            resumed, data="squares.txt".join(("0.5*", ",0.5*code"))
        ),
        "corpus.seq_len is 12, but": dataclasses.replace(
            resumed, corpus=dataclasses.replace(mixed.corpus, seq_len=12)
        ),
    }
    for words, other in others.items():
        with pytest.raises(CheckpointError, match=words):
            resolve(other)


def test_one_rank_a_host_reads_the_text(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others believe what it has left in the cache."""
    reads: list[Path] = []
    read = corpus._read_bytes
    monkeypatch.setattr(corpus, "_read_bytes", lambda file: reads.append(file) or read(file))
    folders: set[Path] = set()
    for rank in range(3):
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
        for name, value in here.items():
            monkeypatch.setenv(name, str(value))
        two = dataclasses.replace(config, strategy="dp3", batch=BatchConfig(global_size=3))
        folders.add(resolve(two).tokens.folder)
        if rank == 0:
            assert len(reads) == 3  # what it is, a tokenizer, tokens
    assert len(folders) == 1 and len(reads) == 3
