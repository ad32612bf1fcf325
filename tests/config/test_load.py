"""Where a value comes from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.config import CorpusConfig, OptimizerConfig, TrainConfig
from phalanx.config.fields import (
    settings,
)
from phalanx.config.load import load_config, missing_path_notes
from phalanx.config.validate import check
from phalanx.errors import ConfigError, PhalanxError

KEYS = {setting.key: setting.hint for setting in settings(TrainConfig)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('model = "demo"\nsteps = 7\n[optimizer]\nlr = 1\nclip_p = inf\n')
    return path


def test_the_command_line_goes_before_the_file_and_the_file_before_defaults(file: Path) -> None:
    loaded = load_config(["--config", str(file), "--optimizer.lr", "0.5", "--corpus.no-shuffle"])
    assert loaded.config == TrainConfig(
        model="demo",
        steps=7,
        corpus=CorpusConfig(shuffle=False),
        optimizer=OptimizerConfig(lr=0.5, clip_p=float("inf")),
    )
    said = {key: source for key, source in loaded.sources.items() if source != "default"}
    assert said == {
        "model": str(file),  # its value is the default's, but the file says it
        "steps": str(file),
        "optimizer.clip_p": str(file),
        "optimizer.lr": "command line",
        "corpus.shuffle": "command line",
    }
    assert list(loaded.sources) == list(KEYS)


def test_both_spellings_of_an_option(file: Path) -> None:
    spelled = ["--optimizer.min-lr-ratio=0", "--optimizer.warmup_steps", "3", f"--config={file}"]
    loaded = load_config(spelled)
    assert (loaded.config.optimizer.min_lr_ratio, loaded.config.optimizer.warmup_steps) == (0, 3)
    assert loaded.sources["optimizer.min_lr_ratio"] == "command line"
    assert loaded.config.steps == 7


def test_none_unsets_what_the_file_sets(file: Path) -> None:
    loaded = load_config(["--config", str(file), "--steps", "none", "--epochs", "2"])
    check(loaded.config)
    assert (loaded.config.steps, loaded.config.epochs) == (None, 2.0)


def test_without_words_everything_is_the_default() -> None:
    loaded = load_config([])
    assert loaded.config == TrainConfig()
    assert set(loaded.sources.values()) == {"default"}
    assert not loaded.json and not loaded.show_config
    check(loaded.config)


def test_files_are_merged_in_order(file: Path, tmp_path: Path) -> None:
    """A wrapper script has a file of its own, and the user gives another after it."""
    later = tmp_path / "later.toml"
    later.write_text("seed = 3\n[optimizer]\nlr = 2\n")
    for words in (
        [f"--config={file}", "--config", str(later)],
        ["--config", str(file), f"--config={later}"],
    ):
        loaded = load_config([*words, "--seed", "4"])
        assert loaded.config.optimizer == OptimizerConfig(lr=2, clip_p=float("inf"))
        assert (loaded.config.steps, loaded.config.seed) == (7, 4)
        assert loaded.sources["optimizer.lr"] == str(later)
        assert loaded.sources["steps"] == str(file)
    with pytest.raises(ConfigError, match=r"no such file"):
        load_config(["--config", str(tmp_path / "none.toml"), "--config", str(file)])


def test_a_path_in_a_file_is_relative_to_the_working_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.write_text('data = "text.txt"')
    assert load_config(["--config", str(file)]).config.data == "text.txt"


@pytest.mark.parametrize(("make", "words"), [
    (lambda path: path.write_text('out = "/elsewhere"'), "no run saves 'out' there"),
    (lambda path: path.write_text("nproc = 7"), "no run saves 'nproc' there"),
    (os.mkfifo, "config.toml is no regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "config.toml is a link, expected a regular"),
    (lambda path: path.symlink_to("nowhere"), "config.toml is a link, expected a regular"),
    (Path.mkdir, "config.toml: cannot be read: Is a directory"),
])  # fmt: skip
def test_a_file_of_somebody_elses_run_is_not_obeyed(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "config.toml")
    with pytest.raises(PhalanxError, match=words):
        load_config(["--resume", str(tmp_path)])


def test_a_run_that_goes_on_writes_to_no_cache_that_its_file_names(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('seed = 7\n[corpus]\ncache = "/elsewhere"\n')
    words = ["--resume", str(tmp_path)]
    assert load_config(words).config.corpus.cache is None
    assert load_config(words).config.seed == 7
    assert load_config([*words, "--corpus.cache", "mine"]).config.corpus.cache == "mine"


def test_a_pipe_or_a_device_is_no_file_of_settings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.toml")  # without a writer, for which a plain open would wait
    for path in (tmp_path / "a.toml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path} is no regular file; expected a TOML file"):
            load_config(["--config", str(path)])


def test_a_pipe_that_the_shell_has_opened_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"seed = 7")
    os.close(writer)
    assert load_config(["--config", f"/dev/fd/{reader}"]).config.seed == 7
    os.close(reader)


def test_a_link_to_a_file_of_settings_is_read(file: Path, tmp_path: Path) -> None:
    file.write_text("seed = 7")
    (tmp_path / "link.toml").symlink_to(file)
    assert load_config(["--config", str(tmp_path / "link.toml")]).config.seed == 7


def test_a_path_of_a_file_that_is_not_here_is_named_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x" / "notes").mkdir(parents=True)
    (tmp_path / "y").mkdir()
    (tmp_path / "x" / "run.toml").write_text('data = "notes"\ntokenizer = "t.json"')
    monkeypatch.chdir(tmp_path / "y")
    assert missing_path_notes(load_config(["--config", "../x/run.toml"])) == [
        "data 'notes', from ../x/run.toml, does not exist in the working folder; ../x/notes exists",
        "tokenizer 't.json', from ../x/run.toml, does not exist in the working folder",
    ]
    assert missing_path_notes(load_config(["--data", "notes"])) == []
