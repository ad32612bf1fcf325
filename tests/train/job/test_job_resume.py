"""`--resume RUN` alone goes on with any run; what is given beside it is named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from phalanx.checkpoint import manifest
from phalanx.cli.main import main
from phalanx.config import BatchConfig, ShapeConfig
from phalanx.config.load import load_config
from phalanx.config.validate import check
from phalanx.errors import CheckpointError, ConfigError
from phalanx.launch.local import run_ranks
from phalanx.train.job.resolve import Job, remarks_on, resolve
from phalanx.train.job.resume import check_stream
from phalanx.train.job.run_folder import claim
from phalanx.train.run import train
from phalanx.train.text import TextSession
from small_run import losses, records, small_run

STEPS, EVERY = 24, 4

TOML = f"""\
data = "文本/一.txt"
precision = "float32"
device = "cpu"
threads = 1
steps = {STEPS}
eval_every = 0
eval_samples = 4
save = "every={EVERY}"
[shape]
num_layers = 1
hidden = 16
num_heads = 2
ffn = 24
dropout = 0.1
[corpus]
seq_len = 16
cache = "cache"
validation = 0.1
[optimizer]
lr = 0.003
"""
FLAGS = [
    *("--strategy", "fsdp2", "--seed", "7", "--batch.global-size", "8", "--batch.microbatch", "2"),
    *("--shape.vocab-size", "512", "--corpus.vocab-size", "400", "--optimizer.warmup-steps", "5"),
]
TRAIN = ["train", "--config", "run.toml", *FLAGS]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of settings and a text, and a run of both that nothing stopped."""
    home = tmp_path_factory.mktemp("home")
    lines = (f"第{n}个数的平方是{n * n},立方是{n**3}。\n" for n in range(500))
    (home / "文本").mkdir()
    (home / "文本" / "一.txt").write_text("".join(lines))
    (home / "run.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main([*TRAIN, "--out", "runs/whole", "--report"]) == 0
    assert len(losses(home / "runs/whole")) == STEPS
    return home


@pytest.fixture
def run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run as it was after some steps, and another working folder."""
    run = tmp_path / "runs" / "half"
    shutil.copytree(home / "runs/whole", run)
    for steps_done, folder in manifest.complete_checkpoints(run).items():
        if steps_done > 5 * EVERY:
            shutil.rmtree(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return run


def resolved(*words: str) -> Job:
    config = load_config(words).config
    check(config)
    return resolve(config)


def test_the_command_that_began_a_run_resumes_it(
    run: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    done = max(manifest.complete_checkpoints(run))
    assert main([*TRAIN, "--out", str(run), "--resume", "auto"]) == 0
    assert losses(run)[-(STEPS - done) :] == losses(home / "runs/whole")[done:]


def run_patched(home: Path, out: Path, patch: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a session of its own, with `patch` run by each Python before it."""
    folder = out.parent / "patch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(patch)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *TRAIN, "--out", str(out)],
        cwd=home,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


KILL = """\
import os, signal

rename = os.rename


def renamed(source, target):
    rename(source, target)
    if str(target).endswith("step-00000012"):
        os.killpg(0, signal.SIGKILL)


os.rename = renamed
"""
"""Kill all processes of the job when the third checkpoint is published."""


def test_a_run_goes_on_alone_to_the_bit(home: Path, run: Path) -> None:
    """Made from a file and flags, on Chinese text with a tokenizer of its own."""
    assert max(manifest.complete_checkpoints(run)) < STEPS
    assert main(["train", "--resume", str(run)]) == 0
    ours, expected = (
        manifest.complete_checkpoints(folder)[STEPS] for folder in (run, home / "runs/whole")
    )
    names = sorted(path.name for path in expected.glob("*.safetensors"))
    assert len(names) == 2
    assert all((ours / name).read_bytes() == (expected / name).read_bytes() for name in names)


@pytest.mark.slow
def test_a_killed_run_goes_on_alone_to_the_bit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kill -9 of the whole job, when the third checkpoint is published."""
    killed = tmp_path / "killed"
    assert run_patched(home, killed, KILL).returncode == -signal.SIGKILL
    assert max(manifest.complete_checkpoints(killed)) == 3 * EVERY
    monkeypatch.chdir(tmp_path)  # the text, the cache and the run lie elsewhere from here
    assert main(["train", "--resume", "killed"]) == 0
    last = {record["step"]: record["loss"] for record in records(killed, "step")}
    assert list(last.values()) == losses(home / "runs/whole")
    expected, ours = (records(run, "config")[-1] for run in (home / "runs/whole", killed))
    for name in ("time", "out", "resume", "report"):
        del expected[name], ours[name]
    # A run's own file names no folder to be written.
    assert ours["corpus"] == {**expected["corpus"], "cache": None}
    assert ours == {**expected, "corpus": ours["corpus"]}


FULL_DISK = """\
import errno, os

sync = os.fsync


def full(descriptor):
    if "step-00000012.partial/rank-00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    sync(descriptor)


os.fsync = full
"""
"""A disk without room for one file of the third save."""


# tests/checkpoint/test_saver.py has the failed save, and a run above goes on alone.
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a descriptor's name is read from /proc")
def test_a_run_whose_disk_was_full_goes_on_alone_to_the_bit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    done = run_patched(home, run, FULL_DISK)
    stands, failed = (manifest.folder_of(run, steps_done) for steps_done in (2 * EVERY, 3 * EVERY))
    file = f"{failed}.partial/rank-00001.safetensors"
    words = (
        f"cannot save {failed} (the last checkpoint is {stands}): {file}: No space left on device"
    )
    assert done.returncode == 2 and done.stderr.count(words) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"last checkpoint: {stands}; resume by: phalanx train --resume {run}" in done.stderr
    assert list(manifest.complete_checkpoints(run)) == [EVERY, 2 * EVERY]
    assert not list((run / "checkpoints").glob("*.partial"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "run"]) == 0
    last = {record["step"]: record["loss"] for record in records(run, "step")}
    assert list(last.values()) == losses(home / "runs/whole")


def test_the_file_of_a_run_is_whole_and_says_all(home: Path) -> None:
    folder = home / "runs/whole"
    values = tomllib.loads((folder / "config.toml").read_text())
    assert values["strategy"] == "fsdp2" and values["model"] == "demo"
    assert values["data"] == str(home / "文本/一.txt")
    assert values["corpus"]["cache"] == str(home / "cache")
    assert values["batch"] == {"global_size": 8, "microbatch": 2}
    assert values["optimizer"]["lr"] == 0.003
    assert not {"out", "resume", "nproc", "init", "report"} & set(values)
    (config,) = records(folder, "config")
    assert (config["precision"], config["nproc"], config["out"]) == ("float32", 2, str(folder))
    assert config["batch"] == {**values["batch"], "accumulation": 2}


def test_the_file_of_a_run_begins_another(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = resolved("--config", str(home / "runs/whole/config.toml"))
    assert job.start is None and job.out.parts[0] == "runs" and job.num_steps == STEPS
    (before,) = records(home / "runs/whole", "config")
    wider = resolved("--config", str(home / "runs/whole/config.toml"), "--strategy", "dp4")
    assert (wider.batch.global_size, wider.batch.accumulation) == (8, 1)
    now = json.loads(json.dumps(dataclasses.asdict(job.config)))
    assert now == {key: before[key] for key in now} | {"out": None, "report": False}


def test_what_is_given_beside_replaces_and_is_named(run: Path, tmp_path: Path) -> None:
    assert remarks_on(resolved("--resume", str(run))) == []
    (tmp_path / "more.toml").write_text("steps = 170\nsave = 'every=50'\n")
    job = resolved(
        *("--resume", str(run), "--strategy", "dp4", "--config", str(tmp_path / "more.toml")),
        *("--optimizer.lr", "0.1", "--save", "every=60"),
    )
    assert str(job.batch) == "global batch 8 = microbatch 2 x accumulation 1 x 4 data ranks"
    assert remarks_on(job) == [
        f"resumes with changed settings: strategy fsdp2 -> dp4, steps {STEPS} -> 170, "
        "save every=4,minutes=10 -> every=60,minutes=10, optimizer.lr 0.003 -> 0.1"
    ]
    for words, num_steps in (("--steps 50", 50), ("--epochs 1", None)):
        job = resolved("--resume", str(run), *words.split())
        assert job.config.steps == num_steps
    for words, sizes in {
        "--batch.global-size 12": (12, 2, 3),
        "--batch.microbatch 1": (8, 1, 4),
        "--batch.accumulation 1": (8, 4, 1),
        "--batch.microbatch 3 --batch.accumulation 1": (6, 3, 1),
    }.items():
        batch = resolved("--resume", str(run), *words.split()).batch
        assert (batch.global_size, batch.microbatch, batch.accumulation) == sizes


def test_a_run_from_other_weights_and_a_tokenizer_of_its_own_goes_on_alone(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    shutil.copy("runs/whole/tokenizer.json", "mine.json")
    shutil.copytree("runs/whole", "origin")
    config = load_config(["--config", "runs/whole/config.toml"]).config
    begun = dataclasses.replace(
        config, init="origin", tokenizer="mine.json", model=None, steps=6, save="every=3",
        shape=ShapeConfig(dropout=0.2), out=str(tmp_path / "tuned"),
        corpus=dataclasses.replace(config.corpus, vocab_size=None),
    )  # fmt: skip
    train(begun)
    expected = losses(tmp_path / "tuned")
    shutil.rmtree(manifest.folder_of(tmp_path / "tuned", 6))
    shutil.rmtree("origin")  # its weights are in the run by now, its tokenizer too
    Path("mine.json").unlink()
    monkeypatch.chdir(tmp_path)
    job = resolved("--resume", "tuned")
    assert job.shape.dropout == 0.2 and job.init is None and remarks_on(job) == []
    assert job.config.init == str(home / "origin")
    assert main(["train", "--resume", "tuned"]) == 0
    assert losses(tmp_path / "tuned")[-3:] == expected[-3:]
    values = tomllib.loads((tmp_path / "tuned/config.toml").read_text())
    assert (values["init"], values["tokenizer"]) == (str(home / "origin"), str(home / "mine.json"))


def test_a_checkpoint_of_a_run_has_the_settings_of_the_run(run: Path) -> None:
    for place in (run, manifest.find(run)):
        assert resolved("--resume", str(place)).config.optimizer.warmup_steps == 5
    with pytest.raises(ConfigError, match=r"init is .* and resume is"):
        resolved("--resume", str(run), "--init", str(run))


def test_a_size_of_the_text_that_is_no_number_is_shown(run: Path) -> None:
    """As in a manifest that somebody else has changed."""
    found, job = manifest.find_and_read(run), resolved("--resume", str(run))
    stream = {**found.about.stream, "text": "another", "text bytes": "many"}
    changed = found._replace(about=dataclasses.replace(found.about, stream=stream))
    with pytest.raises(CheckpointError, match=r"has changed since \(many bytes, now [\d,]+\)"):
        check_stream(changed, job.config, job.tokens)


def test_a_run_that_was_resumed_with_another_length_keeps_it(run: Path) -> None:
    """Even if it was killed before it saved: what it was told last is in its file."""
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(f"steps = {STEPS}", "steps = 190"))
    job = resolved("--resume", str(run))
    assert job.num_steps == 190
    assert f"steps {STEPS} -> 190" in remarks_on(job)[0]


def test_a_linked_folder_of_checkpoints_is_the_runs_own(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints").rename(tmp_path / "large disk")
    (run / "checkpoints").symlink_to(tmp_path / "large disk")
    assert resolved("--resume", str(run)).out == run


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--data OTHER", r"--data .*other\.txt \(\d+ bytes\) is not the text that this run was "
         r"made with, --data .*一\.txt \([\d,]+ bytes\); leave --data out, or start"),
        ("--corpus.max-bytes 5000", "corpus.max_bytes is 5000, but this run was made with None"),
        ("--corpus.vocab-size 300", r"the tokenizer \(a new one of 300 tokens\) is not the "
         r"one .*leave --tokenizer and --corpus.vocab-size out to use .*tokenizer\.json"),
        ("--seed 8", "seed is 8, but this run was made with 7; leave it out, or start a new"),
        ("--corpus.no-shuffle", "corpus.shuffle is False, but this run was made with True"),
        ("--corpus.validation 0.2", "corpus.validation is 0.2, but this run was made with 0.1"),
    ],
)  # fmt: skip
def test_what_changes_the_samples_is_refused_by_its_name(
    run: Path, tmp_path: Path, words: str, fault: str
) -> None:
    (tmp_path / "other.txt").write_text("another text, of some few words\n" * 30)
    words = words.replace("OTHER", str(tmp_path / "other.txt"))
    with pytest.raises(CheckpointError, match=fault) as caught:
        resolved("--resume", str(run), *words.split())
    assert f"--init {run}" in str(caught.value)


def test_a_text_that_has_changed_is_named(tmp_path: Path) -> None:
    config = small_run(tmp_path, strategy="dp1", steps=2, num_lines=100)
    train(config)
    before = (tmp_path / "squares.txt").stat().st_size
    (tmp_path / "squares.txt").write_text((tmp_path / "squares.txt").read_text() + "more\n")
    with pytest.raises(
        CheckpointError, match=rf"squares.txt, .* \({before:,} b.* {before + 5:,}\)"
    ):
        resolved("--resume", str(tmp_path / "run"))


def rows_of(job: Job, num_steps: int) -> list[int]:
    """Take steps and save; return the rows of the global order that this rank had."""
    session = TextSession(job)
    rows: list[int] = []
    with session:
        for _ in range(num_steps):
            microbatches = next(session.loader)
            rows += [int(row) for batch in microbatches for row in batch.rows_B]
            session.step(microbatches)
        session.begin_save()
    return rows


def test_another_global_batch_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    """The place in the data is what was consumed, not the steps times the present batch."""
    config = small_run(tmp_path, strategy="dp2", steps=9)
    job = resolve(config)
    rows = [sorted(chain(*run_ranks(rows_of, 2, job, 2, threads=1)))]
    for size, num_steps in ((4, 3), (12, 2)):
        batch = BatchConfig(global_size=size, microbatch=2)
        job = resolve(dataclasses.replace(config, resume=config.out, batch=batch))
        rows.append(sorted(chain(*run_ranks(rows_of, 2, job, num_steps, threads=1))))
    assert rows == [list(range(16)), list(range(16, 28)), list(range(28, 52))]


def test_runs_of_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolve(small_run(tmp_path, strategy="dp1", steps=2, out=None))
    monkeypatch.chdir(tmp_path)
    names = [claim(job).out.name for _ in range(3)]
    assert names == [job.out.name, f"{job.out.name}-2", f"{job.out.name}-3"]
    named = dataclasses.replace(job, config=dataclasses.replace(job.config, out="runs/mine"))
    named = dataclasses.replace(named, out=Path("runs/mine"))
    assert claim(named).out == claim(named).out == Path("runs/mine")
