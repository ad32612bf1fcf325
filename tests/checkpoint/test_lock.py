"""The lock of a run: waited for, and acquired in a folder that its holder removes meanwhile."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.lock import RunLock
from phalanx.storage import remove_folder


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_lock_that_is_soon_free_is_waited_for(tmp_path: Path, is_removed: bool) -> None:
    """The holder may be refused, and remove the folder of its run."""
    run = tmp_path / "run"
    held, waiting = RunLock(run), RunLock(run)
    held.take()
    is_free = threading.Event()

    def release() -> None:
        if is_removed:
            remove_folder(run)
        is_free.set()
        held.release()

    threading.Timer(0.3, release).start()
    mark = waiting.take()
    assert is_free.is_set()
    waiting.check_shared(mark)
    waiting.release()


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_folder_removed_before_its_lock_is_opened_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another process removes it while `mkdir` looks at it, or after `mkdir` and before `open`."""
    run, whole = tmp_path / "run", getattr(Path, call)
    (run / "checkpoints").mkdir(parents=True)

    def removed_first(path: Path, *args: Any, **options: Any) -> Any:
        if run.is_dir():
            monkeypatch.undo()
            shutil.rmtree(run)
            if call == "mkdir":
                raise FileExistsError(str(path))
        return whole(path, *args, **options)

    monkeypatch.setattr(Path, call, removed_first)
    lock = RunLock(run)
    lock.check_shared(lock.take())
    lock.release()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(FileExistsError):
        RunLock(tmp_path).take()
