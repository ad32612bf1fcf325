"""A job for the trainer with something wrong is refused in one sentence before its first step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import wrong_jobs
from wrong_jobs import AT_FIRST, AT_ONCE, SPLIT, STAGED

import phalanx
from marks import by_hand
from phalanx.cli.main import main
from phalanx.errors import ConfigError, PhalanxError
from phalanx.script.trainer import trainer_of


@pytest.mark.parametrize("case", AT_ONCE)
def test_what_a_trainer_is_told_is_checked_at_once(case: str) -> None:
    changes, words = AT_ONCE[case]
    with pytest.raises(PhalanxError, match=re.escape(words)) as told:
        wrong_jobs.trainer(changes)
    assert told.value.exit_code == 2


@pytest.mark.parametrize(("option", "words"), [
    ({"save": "every=-1"}, "phalanx.Options: save: every is -1; expected at least 0"),
    ({"eval_every": 1.5}, "eval_every is 1.5; expected a whole number"),
    ({"save": "minutes=inf"}, "save: minutes is inf"),
    ({"device": "gpu"}, "device is 'gpu'; expected one of auto, cpu, cuda"),
    ({"threads": 0}, "threads is 0; expected at least 1"),
    ({"threads": 10**9}, "the nearest is 4096"),
    ({"timeout_s": 1e300}, "the nearest is 1000000"),
    ({"timeout_s": 0.0}, "timeout_s is 0.0; expected more than 0"),
    ({"out": 3}, "out is 3; expected a folder"),
])  # fmt: skip
def test_options_are_checked_at_once(option: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        phalanx.Options(**{"out": Path("runs/x"), **option})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("strategy", "case"), [
    ("dp1", "adafactor"), ("dp2", "no graph"), ("fsdp2", "rprop"),
    *(by_hand("dp1", case) for case in AT_FIRST),
    *(by_hand("dp2", case) for case in AT_FIRST),
    *(by_hand("fsdp2", case) for case in SPLIT),
    *(by_hand("pp2", case) for case in AT_FIRST | STAGED),
    *(by_hand("dp1", case) for case in AT_ONCE),
])  # fmt: skip
def test_a_wrong_job_is_one_sentence_and_leaves_nothing(
    strategy: str, case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, words = (SPLIT if strategy == "fsdp2" else AT_ONCE | AT_FIRST | STAGED)[case]
    script = f"{Path(__file__).parent}/wrong_jobs.py:{wrong_jobs.name_of(case)}"
    out = tmp_path / "out"
    asked = ["train", "--script", script, "--strategy", strategy, "--out", str(out)]
    assert main([*asked, "--threads", "1"]) == 2
    said = capfd.readouterr().err.strip()
    assert words in said
    assert len(said.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("name", ["a.b.py", "j.txt"])
def test_a_file_that_cannot_be_imported_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("def job(): pass\n")
    with pytest.raises(ConfigError, match=r"such as a_b\.py|expected FILE\.py:FUNCTION"):
        trainer_of(f"{tmp_path / name}:job")
