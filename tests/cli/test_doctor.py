"""phalanx doctor: what it finds, what it says, and what it says when ranks cannot meet."""

from __future__ import annotations

import json

import pytest

from phalanx.cli import doctor
from phalanx.cli.main import main
from phalanx.errors import RankFailed


def test_doctor_lets_two_processes_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["self_test"]["passed"] and found["self_test"]["seconds"] > 0
    assert found["backends"]["gloo"]
    assert found["versions"]["torch"] and found["packages"]["rich"]


def test_a_failed_self_test_is_shown_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_ranks(*_: object, **__: object) -> None:
        raise RankFailed(1, "no route")

    monkeypatch.setattr("phalanx.launch.local.run_ranks", run_ranks)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "no route" in text
    assert max(map(len, text.splitlines())) <= 100


def test_wrong_sums_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.local.run_ranks", lambda *_, **__: [(0.0, 1.0), (3.0, 1.0)])
    result = doctor.self_test()
    assert not result["passed"]
    assert "wrong sums: [0.0, 3.0]" in result["error"]


def test_doctor_names_the_nearest_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jsn"]) == 2
    assert "did you mean '--json'?" in capsys.readouterr().err
