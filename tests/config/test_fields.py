"""Types, ranges and purposes of settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.ceiling import CeilingConfig
from phalanx.bench.cut import CutConfig
from phalanx.bench.mfu import MfuConfig
from phalanx.bench.scaling import ScalingConfig
from phalanx.cli.convert import ConvertConfig
from phalanx.cli.doctor import DoctorConfig
from phalanx.config import TrainConfig
from phalanx.config.fields import (
    Parts,
    Range,
    Use,
    check_type,
    check_values,
    describe,
    settings,
    value_at,
    with_value,
)
from phalanx.config.help import field_docstrings
from phalanx.config.validate import check
from phalanx.errors import ConfigError
from phalanx.train.job.resume import stored_settings
from phalanx.verify.settings import VerifyConfig

KEYS = {setting.key: setting.hint for setting in settings(TrainConfig)}


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
        ("optimizer.clip_p", 3.0, "clip_p is 3; expected 1, 2 or inf; the nearest is 2"),
        ("corpus.seq_len", 1, "at least 2; the nearest is 2"),
        ("corpus.validation", 1.0, "a number in [0, 1)"),
        ("corpus.vocab_size", 100, "the nearest is 257"),
        ("seed", -3, "the nearest is 0"),
        ("nproc", 0, "nproc is 0; expected at least 1"),
        ("corpus.tail", "keeep", "did you mean 'keep'?"),
        ("steps", "7", "steps is '7'; expected a whole number"),
        ("shape.hidden", 2**63, "in [1, 9223372036854775807]; the nearest is 9223372036854775807"),
        ("steps", 1e300, "steps is 1e+300; expected a whole number"),
    ],
)
def test_values_out_of_range(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(with_value(TrainConfig(), key, value))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("steps", "a number in [1, 1099511627776]; the nearest is 1099511627776"),
        ("nproc", "a number in [1, 9223372036854775807]; the nearest is 9223372036854775807"),
        ("optimizer.lr", "a number of at most 1.79769e+308"),
        ("optimizer.clip_p", "a number of at most 1.79769e+308"),
    ],
)
def test_a_whole_number_above_all_floats_is_out_of_range(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is 1000\d+; expected {re.escape(words)}"):
        check(with_value(TrainConfig(), key, 10**400))


@pytest.mark.parametrize("key", ["steps", "compile"])
def test_a_number_that_python_does_not_print_is_named_by_words(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is a whole number of thousands of digits; expec"):
        check(with_value(TrainConfig(), key, 1 << 20_000))


SCHEMAS = [
    TrainConfig, VerifyConfig, ConvertConfig, DoctorConfig, CeilingConfig, MfuConfig,
    ScalingConfig, CutConfig,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_number_has_a_range(schema: type) -> None:
    for setting in settings(schema):
        is_number = "number" in describe(setting.hint)
        assert (setting.range is not None) == is_number, setting.key


def test_every_setting_of_a_run_is_for_something() -> None:
    purposes = (
        Use.EQUAL,
        Use.DATA_ORDER,
        Use.RESOLVED,
        Use.LOCAL,
        Use.PATH,
    )
    for setting in settings(TrainConfig):
        assert [use in setting.use for use in purposes].count(True) == 1, setting.key
        assert (setting.hint == (str | None)) or Use.PATH not in setting.use


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_setting_has_a_text_and_a_legal_default(schema: type) -> None:
    assert set(field_docstrings(schema)) >= {setting.key for setting in settings(schema)}
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


def test_a_run_keeps_what_another_start_of_it_needs() -> None:
    left = {"out", "resume", "nproc", "report", "profile", "batch.accumulation"}
    left |= {"memory_every", "debug_net"}  # of the launcher, and of this start
    left |= {"server.coordinator", "server.worker", "server.secret"}
    assert set(KEYS) - set(stored_settings(TrainConfig())) == left


@dataclass(frozen=True)
class Box(Parts):
    KEY: ClassVar = "box"
    width: Annotated[int, Range(1)]
    depth: int
    color: str = "grey"


def test_a_text_of_parts_takes_the_rest_from_a_preset_or_defaults() -> None:
    assert Box.parse("depth=2, width=3") == Box(3, 2)
    assert Box.parse("depth=4", Box(3, 2, "red")) == Box(3, 4, "red")
    with pytest.raises(ConfigError, match="box is 'color=red'; expected also width and depth, "):
        Box.parse("color=red")
    with pytest.raises(ConfigError, match="box: width is 0; expected at least 1; the nearest is 1"):
        Box.parse("width=0", Box(3, 2))
