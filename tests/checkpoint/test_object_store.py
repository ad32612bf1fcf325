"""Checkpoints at addresses: what is published, replaced, removed and fenced, and what fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from phalanx import object_store
from phalanx.checkpoint import manifest
from phalanx.checkpoint.weights import open_checkpoint, sizes_of
from phalanx.config import ShapeConfig
from phalanx.config.file import to_toml
from phalanx.errors import CheckpointError, StoreError
from phalanx.launch.local import run_ranks
from phalanx.object_store import path_of
from phalanx.train.job.resume import stored_settings
from small_run import SHAPE, losses, small_run


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
    import fsspec

    store = fsspec.filesystem("memory").store
    store["/bucket/run/logs/../../../../out"] = store[str(rank_file)]
    assert object_store.listed(run) and all(
        ".." not in str(each) for each in object_store.listed(run)
    )
    return seen


def test_a_run_in_memory() -> None:
    (seen,) = run_ranks(save_and_load, 1, "memory://bucket/run", threads=1)
    assert seen["steps"] == [2, 3] and seen["values"] == [20, 30] and seen["replaced"] == 77
    files = [key.rpartition("/")[2] for key in seen["keys"]]
    assert files == [".lock", *["index.json", "rank-00000.safetensors", "manifest.json"] * 2]
    assert seen["after failures"] == (0, 40)
    assert seen["last"] == [4]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # six jobs are started from nothing
def test_a_run_in_s3_has_the_losses_of_one_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes on another host and strategy; a copy of the run on disk can be read too."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    moto = server.ThreadedMotoServer("127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "a",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "first"),
    }.items():
        monkeypatch.setenv(name, value)
    import fsspec

    files = fsspec.filesystem("s3")
    files.mkdir("bucket")
    disk, store = str(tmp_path / "disk"), "s3://bucket/run"
    config = small_run(tmp_path, num_lines=60, steps=4, save="every=2", shape=ShapeConfig())
    shape = {f"shape.{name}": each for name, each in vars(SHAPE).items() if each is not None}
    (tmp_path / "run.toml").write_text(to_toml(stored_settings(config) | shape))

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "phalanx", "train", *arguments], check=True)

    for out in (disk, store):
        run("--config", str(tmp_path / "run.toml"), "--strategy", "fsdp2", "--out", out)
    assert losses(path_of(store)) == losses(disk)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    for strategy, steps in (("fsdp2", "6"), ("dp1", "7")):
        for each in (disk, store):
            run("--resume", each, "--strategy", strategy, "--steps", steps)
    assert losses(path_of(store)) == losses(disk) and len(losses(disk)) == 7
    files.put(f"{disk}/", "bucket/copied", recursive=True)
    loaded = [open_checkpoint(path_of(each)) for each in (store, "s3://bucket/copied")]
    for name, size in sizes_of(loaded[0].shape).items():
        first, copied = (each.read(name) for each in loaded)
        assert first.shape == size and torch.equal(first, copied)
    moto.stop()
