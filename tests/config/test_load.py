"""Where a value comes from, what a file may say, and what is refused in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.ceiling import CeilingConfig
from phalanx.bench.mlp import MfuConfig
from phalanx.bench.scaling import ScalingConfig
from phalanx.bench.tensor_table import TensorConfig
from phalanx.cli.convert import ConvertConfig
from phalanx.cli.doctor import DoctorConfig
from phalanx.cli.verify import VerifyConfig
from phalanx.config import CorpusConfig, OptimizerConfig, TrainConfig
from phalanx.config.fields import (
    Use,
    check_type,
    check_values,
    describe,
    settings,
    value_at,
    with_value,
)
from phalanx.config.file import read_values, to_toml
from phalanx.config.help import texts_of
from phalanx.config.law import check
from phalanx.config.load import load_config
from phalanx.errors import ConfigError, StrategyError

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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr = 1", "'lr' does not belong to the top of the file, above all sections; it belongs to "
         "section [optimizer]"),
        ("[optimizer]\nsteps = 1", "'steps' does not belong to section [optimizer]; it belongs to "
         "the top of the file"),
        ("[batch]\nvocab_size = 9", "belongs to section [shape] or section [corpus]"),
        ("stesp = 3", "'stesp' is unknown (did you mean 'steps'?)"),
        ("[optimizer]\nweight_decy = 0.1", "(did you mean 'optimizer.weight_decay'?)"),
        ("[optimzer]\nlr = 1", "section [optimzer] is unknown (did you mean 'optimizer'?)"),
        ("[steps]\nlr = 1", "steps is {'lr': 1}; expected a whole number"),
        ("optimizer = 3", "optimizer is 3; expected a section, [optimizer]"),
        ('steps = "many"', "steps is 'many'; expected a whole number"),
        ("steps = true", "steps is True; expected a whole number"),
        ("steps = 2.6", "steps is 2.6; expected a whole number, of which 3 is the nearest"),
        ("compile = 1", "compile is 1; expected true or false"),
        ("model = 1", "model is 1; expected text"),
        ("steps = [1]", "steps is [1]; expected a whole number"),
        ('[corpus]\ntail = "kep"', "expected one of keep, drop, pad (did you mean 'keep'?)"),
        ("steps = \nseed = 1", "is not TOML: Invalid value (at line 1"),
        ("seed = 1\nseed = 2\n", "is not TOML: Cannot overwrite a value (at line 2"),
    ],
)  # fmt: skip
def test_a_file_is_refused_in_words(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_config(["--config", str(path)])
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file \(did you mean 'run.toml'\?\)"):
        load_config(["--config", str(tmp_path / "rum.toml")])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(["--config", str(tmp_path)])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text; expected a TOML file"):
        load_config(["--config", str(tmp_path / "binary.toml")])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--optimizer.rl 1", "option '--optimizer.rl' is unknown (did you mean '--optimizer.lr'?)"),
        ("--lr 1", "did you mean '--optimizer.lr'?"),
        ("--seq-len=4", "did you mean '--corpus.seq-len'?"),
        ("--show-confg", "did you mean '--show-config'?"),
        ("--steps", "option '--steps' lacks its value; write --steps VALUE"),
        ("--config", "option '--config' lacks its value"),
        ("--steps many", "--steps is 'many'; expected a whole number"),
        ("--optimizer.lr fast", "--optimizer.lr is 'fast'; expected a number"),
        ("--precision float23", "(did you mean 'float32'?)"),
        ("--shape.tied maybe", "--shape.tied is 'maybe'; expected true or false"),
        ("train", "'train' on the command line belongs to no option"),
    ],
)
def test_a_command_line_is_refused_in_words(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_config(line.split())
    assert "\n" not in str(caught.value) and "│" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("epochs", 0.0, "epochs is 0.0; expected more than 0"),
        (
            "corpus.validation",
            float("nan"),
            "validation is nan; expected a number in [0, 1)",
        ),
        ("optimizer.lr", 0.0, "optimizer.lr is 0.0; expected more than 0"),
        ("optimizer.lr", float("nan"), "optimizer.lr is nan"),
        ("optimizer.lr", float("inf"), "and finite"),
        ("optimizer.beta2", 1.0, "a number in [0, 1)"),
        ("optimizer.min_lr_ratio", 1.5, "a number in [0, 1]; the nearest is 1"),
        ("optimizer.clip_p", 3.0, "clip_p is 3; expected 1, 2 or inf, of which 2 is the nearest"),
        ("corpus.seq_len", 1, "at least 2; the nearest is 2"),
        ("corpus.validation", 1.0, "a number in [0, 1)"),
        ("corpus.vocab_size", 100, "the nearest is 257"),
        ("seed", -3, "the nearest is 0"),
        ("nproc", 0, "nproc is 0; expected at least 1"),
        ("corpus.tail", "keeep", "did you mean 'keep'?"),
        ("steps", "7", "steps is '7'; expected a whole number"),
    ],
)
def test_values_out_of_range(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(with_value(TrainConfig(), key, value))


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (TrainConfig(steps=3, epochs=2), ConfigError, "give one of them"),
        (TrainConfig(steps=3, optimizer=OptimizerConfig(warmup_steps=3)), ConfigError, "is 2"),
        (TrainConfig(tokenizer="t.json", corpus=CorpusConfig(vocab_size=999)), ConfigError, "999"),
        (TrainConfig(strategy="dp2", nproc=3), StrategyError, "'dp3' would use them all"),
        (TrainConfig(strategy="pd2"), StrategyError, "did you mean"),
        (TrainConfig(strategy="dp2:ps"), StrategyError, "not built yet"),
    ],
)
def test_contradictions(config: TrainConfig, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        check(config)


SCHEMAS = [
    TrainConfig, VerifyConfig, ConvertConfig, DoctorConfig, CeilingConfig, MfuConfig,
    ScalingConfig, TensorConfig,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_number_has_a_range(schema: type) -> None:
    for setting in settings(schema):
        is_number = "number" in describe(setting.hint)
        assert (setting.range is not None) == is_number, setting.key


def test_every_setting_of_a_run_is_for_something() -> None:
    purposes = (Use.LAW, Use.STREAM, Use.RESOLVED, Use.LOCAL, Use.PATH)
    for setting in settings(TrainConfig):
        assert [use in setting.use for use in purposes].count(True) == 1, setting.key
        assert (setting.hint == (str | None)) or Use.PATH not in setting.use


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_setting_has_a_text_and_a_legal_default(schema: type) -> None:
    assert set(texts_of(schema)) >= {setting.key for setting in settings(schema)}
    check_values(schema())


@given(st.sampled_from(sorted(KEYS)), st.data())
def test_every_setting_can_be_replaced_and_read_back(key: str, data: st.DataObject) -> None:
    value = data.draw(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()))
    changed = with_value(TrainConfig(), key, value)
    assert value_at(changed, key) is value
    others = [other for other in KEYS if other != key]
    assert all(value_at(changed, other) == value_at(TrainConfig(), other) for other in others)
    try:
        check_type(key, KEYS[key], value)
    except ConfigError as error:
        assert str(error).startswith(f"{key} is {value!r}; expected ")


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


@given(
    text=st.text(st.characters(codec="utf-8")), number=st.floats(allow_nan=False),
    whole=st.integers(), truth=st.booleans(),
)  # fmt: skip
def test_a_file_that_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, whole: int, truth: bool
) -> None:
    values = {
        "data": text, "steps": whole, "compile": truth, "optimizer.lr": number,
        "corpus.cache": text, "optimizer.eps": -number,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("written") / "config.toml"
    path.write_text(to_toml({**values, "out": None}), newline="")
    assert read_values(str(path), KEYS) == values


def test_what_toml_cannot_hold_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"data is .*udcff.*not UTF-8"):
        to_toml({"data": "\udcff"})
