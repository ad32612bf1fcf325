import io
import json
import math
from pathlib import Path

import pytest

from phalanx.errors import CheckpointError, ConfigError, TrainingError
from phalanx.measure import logs
from phalanx.measure.logs import (
    METRICS_FILE,
    LiveDisplay,
    RunLog,
    StepRecord,
    json_text,
)
from phalanx.measure.timer import TERMS, StepTimes
from phalanx.report.terminal import Terminal

TIMES = StepTimes({**dict.fromkeys(TERMS, 0.125), "backward": 0.375}, wall_s=1.0)


def record(step: int, loss: float = 2.5, **changes: object) -> StepRecord:
    values: dict[str, object] = {
        "step": step,
        "loss": loss,
        "grad_norm": 1.25,
        "lr": 1e-3,
        "tokens": 4096,
        "tokens_per_s": 12345.6,
        "mfu": 0.31,
        "times": TIMES,
        **changes,
    }
    return StepRecord(**values)  # type: ignore[arg-type]


def plain_console() -> tuple[Terminal, io.StringIO]:
    text = io.StringIO()
    return Terminal(text, is_terminal=False, width=80), text


def lines_of(folder: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / METRICS_FILE).read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_each_record_is_one_flushed_line(tmp_path: Path) -> None:
    console, _ = plain_console()
    log = RunLog(tmp_path / "run", console, 2)
    log.step(record(1))
    # Read before close: a run that is killed keeps what it had.
    (first,) = lines_of(log.folder)
    assert first["kind"] == "step" and first["step"] == 1 and first["loss"] == 2.5
    assert first["backward_s"] == 0.375 and first["wall_s"] == 1.0
    log.evaluation(2, 2.25, {"bits_per_byte": 1.5})
    log.note("environment", {"cores": 2})
    log.close()
    kinds = [line["kind"] for line in lines_of(log.folder)]
    assert kinds == ["step", "evaluation", "environment"]


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_numbers_that_are_not_finite_stay_valid_json(
    tmp_path: Path, value: float, text: str
) -> None:
    console, shown = plain_console()
    with RunLog(tmp_path, console, 5) as log:
        log.step(record(1))
        log.step(record(2, loss=value, skipped=True))
    line = lines_of(tmp_path)[1]
    assert line["loss"] is None
    assert line["loss_text"] == text
    # Shown although the interval has not passed.
    assert "SKIPPED" in shown.getvalue()


def test_nested_values_that_are_not_finite() -> None:
    assert json.loads(json_text({"a": {"b": [math.nan, (1.5, math.inf)]}, "c": -math.inf})) == {
        "a": {"b": [None, [1.5, None]]},
        "c": None,
        "c_text": "-inf",
    }


def test_going_on_appends(tmp_path: Path) -> None:
    console, _ = plain_console()
    for step in (1, 2):
        with RunLog(tmp_path, console, 2) as log:
            log.step(record(step))
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_plain_lines_come_first_last_and_by_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    console, text = plain_console()
    display = LiveDisplay(console, total_steps=100)
    for step in range(1, 101):
        display.step(record(step))
    display.close()
    first, last = text.getvalue().splitlines()
    assert first.startswith("step 1/100  loss 2.5000  12,346 tokens/s  MFU 31.0 % of ceiling")
    assert last.startswith("step 100/100") and last.endswith("left 00:00")

    console, text = plain_console()
    monkeypatch.setattr(logs, "LINES_S", 0.0)
    display = LiveDisplay(console, total_steps=10)
    for step in range(1, 11):
        display.step(record(step, mfu=None))
    assert len(text.getvalue().splitlines()) == 10
    assert "MFU" not in text.getvalue()


def test_terminal_shows_a_bar_with_every_number() -> None:
    text = io.StringIO()
    console = Terminal(text, is_terminal=True, width=110)
    display = LiveDisplay(console, total_steps=4)
    for step in range(1, 5):
        display.step(record(step))
    display.terminal.say("validation after step 4: loss [2]")
    display.close()
    display.close()
    shown = text.getvalue()
    for words in ("step 4/4", "loss 2.5000", "12,346 tokens/s", "MFU 31.0 %", "loss [2]"):
        assert words in shown


@pytest.mark.parametrize(
    ("width", "has", "lacks"),
    [
        (110, ["loss 2.5000", "12,346 tokens/s", "MFU 31.0 % of ceiling", "left 00:00"], []),
        (72, ["loss 2.5000", "12,346 tokens/s", "MFU 31.0 %", "left 00:00"], ["of ceiling"]),
        (60, ["loss 2.5000", "12,346 tokens/s", "left 00:00"], ["MFU"]),
        (40, ["loss 2.5000", "left 00:00"], ["MFU", "tokens/s"]),
        (30, ["loss 2.5000"], ["MFU", "tokens/s", "left"]),
    ],
)
def test_a_narrow_terminal_loses_the_least_important_number(
    width: int, has: list[str], lacks: list[str]
) -> None:
    text = io.StringIO()
    display = LiveDisplay(Terminal(text, is_terminal=True, width=width), total_steps=400)
    display.step(record(399))
    display.step(record(400))
    display.close()
    last = text.getvalue().rsplit("step 400/400", 1)[1]
    assert all(words in last for words in has), last
    assert not any(words in last for words in [*lacks, "\u2026"]), last


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_disk_that_is_full_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "open_to_append", lambda _: Path("/dev/full").open("a"))
    console, _ = plain_console()
    words = f"cannot write {tmp_path / 'metrics.jsonl'}: No space left on device"
    with pytest.raises(TrainingError, match=words) as raised:
        with RunLog(tmp_path, console, 1) as log:
            log.note("environment", {})
    assert raised.value.exit_code == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    console, _ = plain_console()
    with pytest.raises(ConfigError, match="--out"):
        RunLog(tmp_path / "file" / "run", console, 1)


@pytest.mark.parametrize("half", ['{"kind": "step", "lo', "x" * 10_000, ""])
@pytest.mark.parametrize("before", ['{"kind": "step"}\n', ""])
def test_half_a_record_at_the_end_costs_no_other(tmp_path: Path, before: str, half: str) -> None:
    """As after a power cut; the next record would be lost in the same line."""
    (tmp_path / "metrics.jsonl").write_text(before + half)
    with RunLog(tmp_path, Terminal(io.StringIO()), 1) as log:
        log.note("summary", {})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["step"] * bool(before) + ["summary"]


def test_a_folder_that_is_moved_ends_the_run_in_words(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", Terminal(io.StringIO()), 1) as log:
        log.note("environment", {})
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(
            TrainingError, match="run, the folder of this run, was moved or removed"
        ):
            log.note("summary", {})
    assert not (tmp_path / "run").exists()


def test_a_file_in_place_of_the_folder_of_tensorboard_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("mine")
    with pytest.raises(ConfigError, match="tensorboard: File exists; give another folder"):
        RunLog(tmp_path, Terminal(io.StringIO()), 1)
    assert (tmp_path / "tensorboard").read_text() == "mine"


@pytest.mark.parametrize("name", [METRICS_FILE, "tensorboard"])
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is a link"):
        RunLog(run, Terminal(io.StringIO()), 1)
    assert not elsewhere.exists()
