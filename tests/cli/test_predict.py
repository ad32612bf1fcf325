"""`phalanx predict`: one answer for each run, with the figures of the planner, or why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.planner import published

MODEL = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 32_000}
RUN: dict[str, Any] = {
    "id": "a",
    "group": "megatron-sc21",
    "hardware": {"gpu": "A100-SXM-80GB", "memory_gb": 80},
    "num_gpus": 8,
    "model": MODEL,
    "seq_len": 1024,
    "global_batch_seqs": 64,
    "micro_batch": 4,
    "parallel": {"dp": 8},
    "measured": {"step_time_s": 0.5},
}
LARGE = {**RUN, "id": "b", "model": {**MODEL, "layers": 40, "hidden": 8192}, "group": "large"}
NO_HEADS = {**RUN, "id": "c", "model": {"layers": 4, "hidden": 1024}}
NO_MODEL = {key: value for key, value in RUN.items() if key != "model"} | {"id": "d"}
WORDS = {**RUN, "id": "e", "seq_len": "long"}
NEGATIVE = {**RUN, "id": "f", "parallel": {"dp": -3}, "measured": 5}


def file_of(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pipelines_with_zero2_reduce_once_a_step() -> None:
    """As published pipelines do: Megatron-LM, and MegaScale (Jiang et al. 2024)."""

    def seconds(stage: int, **degrees: int) -> float:
        return published.seconds(
            published.read(RUN | {"parallel": degrees | {"zero_stage": stage}})
        )

    assert seconds(2, dp=2, pp=4) == seconds(1, dp=2, pp=4)
    assert seconds(2, dp=8) > seconds(1, dp=8)


def test_each_run_has_its_answer_or_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = RUN, LARGE, NO_HEADS, NO_MODEL, WORDS, NEGATIVE
    assert main(["predict", "--runs", file_of(tmp_path, *rows), "--json"]) == 0
    fits, unfit, *others = map(json.loads, capsys.readouterr().out.splitlines())
    assert fits["step_time_s"] == published.seconds(published.read(RUN))
    assert fits["tokens_per_s_per_device"] == pytest.approx(64 * 1024 / fits["step_time_s"] / 8)
    assert fits["fits"] and 0 < fits["memory_bytes"] < 80e9
    # 32 B parameters at 16 B.
    assert not unfit["fits"] and unfit["memory_bytes"] > 32e9 * 16
    assert [other["id"] for other in others] == ["c", "d", "e", "f"]
    assert all(set(other) == {"id", "error"} and other["error"] for other in others)
    assert "model.heads" in others[0]["error"] and others[1]["error"] == "the run lacks model"
    assert "parallel.dp is -3; expected a whole number from 1" in others[3]["error"]


def test_the_table_has_the_error_of_each_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = {**RUN, "measured": {"step_time_s": 2 * published.seconds(published.read(RUN))}}
    assert main(["predict", "--runs", file_of(tmp_path, half, NO_HEADS, LARGE, NEGATIVE)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["megatron-sc21", "3", "2", "1", "50.0%", "1"] in rows


NO_BATCH = {key: value for key, value in RUN.items() if key != "global_batch_seqs"}


@pytest.mark.parametrize(
    "wrong",
    [
        {**RUN, "measured": {"step_time_s": "fast"}},
        {**RUN, "measured": {"step_time_s": -1}},
        {**RUN, "measured": {"step_time_s": float("nan")}},
        {**RUN, "measured": {"tokens_per_s_per_gpu": 1e999}},
        {**NO_BATCH, "measured": {"tokens_per_s_per_gpu": 1000}},
        {**RUN, "measured": {}, "derived": [1]},
    ],
)
def test_a_time_that_cannot_be_read_is_an_error_of_its_run(
    wrong: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table counts the run as an error, and JSON has what is predicted."""
    half = {**RUN, "measured": {"step_time_s": 2 * published.seconds(published.read(RUN))}}
    path = file_of(tmp_path, half, wrong)
    assert main(["predict", "--runs", path]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["megatron-sc21", "2", "1", "1", "50.0%", "1"] in rows
    assert main(["predict", "--runs", path, "--json"]) == 0
    assert all("step_time_s" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no runs; expected one object a line, with id, hardware"),
        (" \n\n", "has no runs"),
        (None, "--runs is missing"),
        ("{", "line 1 is not valid JSON"),
        ("[]", "line 1 has no id"),
        ("[" * 100_000, "line 1 is not valid JSON"),
        (b"\xff", "it is not UTF-8"),
    ],
)
def test_a_file_that_has_no_runs(
    text: str | bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["predict", *(["--runs", str(path)] if text is not None else [])]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--runs", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err
