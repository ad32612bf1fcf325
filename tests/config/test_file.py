"""What a file of settings may say, and what is written of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import TrainConfig
from phalanx.config.fields import (
    settings,
)
from phalanx.config.file import closest, read_values, to_toml
from phalanx.config.load import load_config
from phalanx.errors import ConfigError

KEYS = {setting.key: setting.hint for setting in settings(TrainConfig)}


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
        ("steps = 2.6", "steps is 2.6; expected a whole number; the nearest is 3"),
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


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=r"no such file \(did you mean 'run.toml'\?\)"):
        load_config(["--config", str(tmp_path / "rum.toml")])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(["--config", str(tmp_path)])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text; expected a TOML file"):
        load_config(["--config", str(tmp_path / "binary.toml")])


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


def test_a_close_name_is_meant_before_one_of_its_initials() -> None:
    assert closest("optimizer.learning_rat", ["optimizer.learning_rate", "optimizer.lr"]) == (
        "optimizer.learning_rate"
    )
