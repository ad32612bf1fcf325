"""What --help shows: every strategy and preset, whole paragraphs, and no default of nothing."""

from __future__ import annotations

import re
import subprocess

import pytest

from phalanx.cli.main import VERBS, main
from phalanx.models.registry import PRESETS
from phalanx.strategy import Strategy, built, require_built


@pytest.fixture
def help_of_train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "--help"]) == 0
    return capsys.readouterr().out


def test_every_strategy_that_is_built_has_a_line(help_of_train: str) -> None:
    for form, about in built().items():
        assert re.search(rf"\n  {re.escape(form)} +{re.escape(about)}\n", help_of_train)
        text = re.sub("/[A-Z]+$", "/2", form).replace("N", "4" if form.endswith(":2d") else "8")
        require_built(Strategy.parse(text))


def test_every_preset_is_listed_with_its_size(help_of_train: str) -> None:
    assert all(re.search(rf"\b{re.escape(name)} [0-9.]+ [BM]\b", help_of_train) for name in PRESETS)
    assert "gpt2-124m 124 M" in help_of_train


def test_a_word_or_a_number_is_said_as_both(help_of_train: str) -> None:
    assert "--batch.microbatch {auto,INT}" in help_of_train


def test_paragraphs_are_whole_and_unset_values_are_explained(help_of_train: str) -> None:
    assert "(default: None)" not in help_of_train  # "none" is a value of --compress
    assert "(default: False)" not in help_of_train
    assert "(default: 256)" in help_of_train
    rows = [line.strip("│ ") for line in help_of_train.splitlines()]
    text = " ".join(rows)
    assert "global_size = microbatch x accumulation x data ranks; two give the third" in text
    assert "or an address such as s3://bucket/web: .txt, .md, .py, .jsonl and .json" in text
    assert max(map(len, help_of_train.splitlines())) <= 100


def test_bash_completes_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--completion"]) == 0
    script = f"{capsys.readouterr().out}\ncomplete -p phalanx"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0
    assert " --corpus.no-shuffle " in ended.stdout and " --optimizer.lr " in ended.stdout


@pytest.mark.parametrize("words", [["help", "bench"], ["bench", "help"], ["help", "doctor"]])
def test_help_may_stand_before_or_after_the_verb(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert "usage: phalanx " + next(w for w in words if w != "help") in capsys.readouterr().out


def test_help_alone_is_the_help_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in VERBS)
    assert "ceiling" in shown and "scaling" in shown


def test_a_width_of_none_is_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["trian"]) == 2
    assert "'trian' is not a verb" in capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["run", "--help"]) == 0
