"""When a run saves is one value, which has a text form, and settings of earlier runs become it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import TrainConfig
from phalanx.config.fields import check_values
from phalanx.config.load import load_config
from phalanx.config.save_policy import SavePolicy, renewed
from phalanx.errors import ConfigError

policies = st.builds(
    SavePolicy,
    every=st.integers(0, 10**6),
    minutes=st.sampled_from([0.0, 1e-9, 0.25, 10.0, 1e6]),
    keep=st.none() | st.integers(1, 99),
    best=st.sampled_from([None, "min:loss", "max:acc@1.0"]),
)


@given(policies)
def test_a_policy_is_its_text(policy: SavePolicy) -> None:
    assert SavePolicy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("every=500", SavePolicy(every=500)),
        ("keep=3, minutes=0", SavePolicy(minutes=0, keep=3)),
        ("best=max:rewards/margins", SavePolicy(best="max:rewards/margins")),
        ("every=0,minutes=10.0,keep=none,best=none", SavePolicy()),
    ],
)
def test_parts_that_are_left_out_have_their_defaults(text: str, policy: SavePolicy) -> None:
    assert SavePolicy.parse(text) == TrainConfig(save=text).save_policy == policy
    assert str(SavePolicy()) == TrainConfig().save == "minutes=10"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every=-1", "save: every is -1; expected at least 0; the nearest is 0"),
        ("every=1.5", "save: every is '1.5'; expected a whole number"),
        ("minutes=nan", "save: minutes is nan; expected at least 0"),
        ("minutes=1e7", "the nearest is 1000000"),
        ("keep=0", "save: keep is 0; expected at least 1; the nearest is 1"),
        ("best=loss", "save: best is 'loss'; expected min: or max: and a measure, such as min:"),
        ("evry=5", "expected NAME=VALUE once for each name, with a name of every, minutes, keep,"),
        ("evry=5", "(did you mean 'every'?)"),
        ("500", "save: '500' in '500'; expected NAME=VALUE"),
        ("keep=1,keep=2", "save: 'keep=2' in 'keep=1,keep=2', but keep is set before"),
    ],
)
def test_a_bad_part_is_refused_with_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_values(TrainConfig(save=text))


@given(policies, st.integers(1, 40), st.data())
def test_checkpoints_are_counted_as_they_are_made(
    policy: SavePolicy, last: int, data: st.DataObject
) -> None:
    saved = data.draw(st.integers(0, last))
    done = data.draw(st.integers(saved, last))
    every = policy.every or last
    due = [n for n in range(saved + 1, done + 1) if n == last or n % every == 0]
    assert policy.num_due(saved, done, last) == len(due)
    assert policy.num_due(done, saved, last) == 0, "a step that is saved already"


def test_only_a_policy_with_minutes_saves_by_time() -> None:
    policy = SavePolicy(minutes=0.5)
    assert not policy.is_late(29.9) and policy.is_late(30.0)
    assert not SavePolicy(minutes=0).is_late(1e9)


OLD = 'model = "demo"\nsave_every = 4\nsave_every_minutes = 10.0\nkeep_checkpoints = 3\n'


def test_the_old_names_in_a_file_are_one_value(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(OLD)
    for words in (["--config", str(file)], ["--resume", str(tmp_path)]):
        loaded = load_config(words)
        assert loaded.config.save == "every=4,minutes=10,keep=3"
        assert loaded.sources["save"] == str(file)
    anew = load_config(["--resume", str(tmp_path), "--save", "keep=5"]).config
    assert anew.save_policy == SavePolicy(keep=5), "the whole value is replaced"
    file.write_text(OLD + 'best = "max:accuracy"\n')
    assert load_config(["--config", str(file)]).config.save_policy.best == "max:accuracy"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('save_every = "often"', "save: every is 'often'; expected a whole number"),
        ('save = "every=3"\nsave_every = 4', "but every is set before"),
        ("save = 5\nbest = 'min:loss'", "save: '5' in 'best=min:loss,5'; expected NAME=VALUE"),
        ("save = 5", "save is 5; expected text"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_name(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "more.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        load_config(["--config", str(file)])
    assert str(refused.value).startswith(f"{file}: ")


def test_settings_in_an_old_manifest_are_one_value() -> None:
    old = {"save_every": 0, "save_every_minutes": 10.0, "keep_checkpoints": None, "best": None}
    assert renewed({"seed": 1, **old}) == {"seed": 1, "save": "minutes=10"}
    assert renewed({"seed": 1}) == {"seed": 1}


@pytest.mark.parametrize(
    ("words", "spelling"),
    [
        (["--save-every", "50"], "--save every=50"),
        (["--save-every-minutes=0"], "--save minutes=0"),
        (["--keep-checkpoints", "3"], "--save keep=3"),
        (["--best", "min:loss"], "--save best=min:loss"),
        (["--best"], "--save best=VALUE"),
    ],
)
def test_an_old_option_is_refused_with_its_new_spelling(words: list[str], spelling: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"(did you mean '{spelling}'?)")):
        load_config(words)
