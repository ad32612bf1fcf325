"""Checkpoints at addresses: what is published, replaced, removed and fenced, and what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs

from phalanx import object_store
from phalanx.checkpoint import manifest
from phalanx.errors import CheckpointError, StoreError
from phalanx.launch.local import run_ranks
from phalanx.object_store import path_of


def keys() -> list[str]:
    import fsspec

    return sorted(fsspec.filesystem("memory").store)


class Failing:
    """A store whose first requests fail, each in one of the ways of stores."""

    def __init__(self, num_failures: int) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self.left, self.asked = num_failures, 0
        for call in ("pipe_file", "cat_file", "find", "info", "rm_file", "open"):
            setattr(MemoryFileSystem, call, self.failing(getattr(MemoryFileSystem, call)))

    def failing(self, call: Any) -> Any:
        def ask(*args: Any, **how: Any) -> Any:
            self.asked += 1
            if self.left:
                self.left -= 1
                if self.left % 3 == 0 and call.__name__ == "pipe_file":
                    call(*args, **how)  # and the answer is lost
                raise [TimeoutError, OSError, ConnectionError][self.left % 3]("slow down")
            return call(*args, **how)

        return ask


def save_and_load(address: str) -> dict[str, Any]:
    """Save, replace and remove on one rank; return what was there in between."""
    object_store.PAUSES_S[:] = [0.0] * 3
    run, seen = path_of(address), {}
    other = runs.Saver(run)
    other.__exit__(None, None, None)  # began before, as a process that is cut off
    for step in (1, 2, 3):
        runs.save_value(run, step, 10 * step, keep=2)
    seen["steps"] = [*manifest.complete_checkpoints(run)]
    seen["values"] = [runs.value_of(each) for each in manifest.complete_checkpoints(run).values()]
    runs.save_value(run, 3, 77, keep=2)
    seen["replaced"] = runs.value_of(manifest.find(run))
    seen["keys"] = keys()
    failing = Failing(5)
    object_store.PAUSES_S[:] = [0.0] * 9
    runs.save_value(run, 4, 40, keep=1)
    seen["after failures"] = failing.left, runs.value_of(manifest.find(run))
    model, optimizer = runs.build()
    for saver, words in ((other, "another process has saved"), (None, "tried 3 times")):
        object_store.PAUSES_S[:] = [0.0] * 2
        failing.left = 99 if saver is None else 0
        with pytest.raises((CheckpointError, StoreError), match=words):
            with saver or runs.Saver(run) as saver_:
                saver_.begin(model, optimizer, runs.about(5))
    failing.left = 0
    seen["last"] = [*manifest.complete_checkpoints(run)]
    rank_file = next(Path(key) for key in keys() if key.endswith(".safetensors"))
    path = path_of(f"memory:/{rank_file}")
    object_store.put(path, object_store.get(path)[:-1] + b"x")
    with pytest.raises(CheckpointError, match="have another sha256"):
        runs.value_of(manifest.find(run))
    return seen


def test_a_run_in_memory() -> None:
    (seen,) = run_ranks(save_and_load, 1, "memory://bucket/run", threads=1)
    assert seen["steps"] == [2, 3] and seen["values"] == [20, 30] and seen["replaced"] == 77
    files = [key.rpartition("/")[2] for key in seen["keys"]]
    assert files == [".lock", *["index.json", "rank-00000.safetensors", "manifest.json"] * 2]
    assert seen["after failures"] == (0, 40)
    assert seen["last"] == [4]
