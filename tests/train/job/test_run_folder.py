"""The folder of a run that fails before its first step: removed only if nobody else needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.checkpoint.lock import RunLock
from phalanx.errors import ScriptError, TrainingError
from phalanx.train.job.run_folder import removed_if_refused

STEP = '{"kind": "step", "loss": 1.0}\n'


def fail(out: Path, begun: list[Path]) -> None:
    """Begin a run, which has the lock of its folder as long as its ranks live, and fail."""
    is_new = not out.exists()
    with pytest.raises(ScriptError, match="too early"), removed_if_refused(out, is_new=is_new):
        lock = RunLock(out)
        lock.take()
        begun.append(out / "checkpoints")
        lock.release()
        raise ScriptError("too early")


def test_a_new_folder_is_removed(tmp_path: Path) -> None:
    begun: list[Path] = []
    fail(tmp_path / "runs" / "new", begun)
    assert begun and not (tmp_path / "runs" / "new").exists()


@pytest.mark.parametrize("has_logs", [False, True])
def test_the_logs_of_a_crash_stay(tmp_path: Path, has_logs: bool) -> None:
    out = tmp_path / "new"
    with pytest.raises(TrainingError), removed_if_refused(out, is_new=True):
        (out / "logs").mkdir(parents=True) if has_logs else out.mkdir()
        raise TrainingError("a rank has ended")
    assert out.exists() == has_logs


def test_a_run_that_another_process_takes_and_ends_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new"

    def taken_later(lock: RunLock) -> bool:
        (out / "metrics.jsonl").write_text(STEP)  # the other had the lock until now
        return True

    monkeypatch.setattr(RunLock, "take_if_free", taken_later)
    with pytest.raises(ScriptError), removed_if_refused(out, is_new=True):
        out.mkdir()
        raise ScriptError("another process saves")
    assert out.exists()


def test_a_folder_of_before_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of the user")
    fail(tmp_path, [])
    assert (tmp_path / "notes.txt").exists()


def test_a_run_that_has_taken_a_step_stays(tmp_path: Path) -> None:
    out = tmp_path / "new"
    with pytest.raises(ScriptError), removed_if_refused(out, is_new=True):
        out.mkdir()
        (out / "metrics.jsonl").write_text(STEP)
        raise ScriptError("in the second step")
    assert (out / "metrics.jsonl").read_text() == STEP


def test_a_folder_in_which_another_process_has_begun_a_run_stays(tmp_path: Path) -> None:
    out, other = tmp_path / "new", RunLock(tmp_path / "new")
    with pytest.raises(ScriptError), removed_if_refused(out, is_new=True):
        other.take()  # it had found no folder either, and was the first to lock it
        raise ScriptError("another process saves")
    assert (out / "checkpoints").exists()
    other.release()


def test_a_run_that_has_made_nothing_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new"
    with pytest.raises(ScriptError), removed_if_refused(out, is_new=True):
        raise ScriptError("a strategy that does not fit")
    assert not out.exists()
