"""Kill -9 in the middle of saving: there is always a whole checkpoint, and none is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs

from marks import by_hand
from phalanx.checkpoint import files, manifest, tensor_file
from phalanx.errors import RankFailed
from phalanx.launch.local import run_ranks
from phalanx.storage import PARTIAL

NUM_MOMENTS = 20


def wait_for(is_there: Callable[[], bool], limit_s: float = 250) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_there():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def published(run: Path) -> list[int]:
    path = run / "published"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def assert_nothing_is_lost(run: Path) -> None:
    """Expect a whole checkpoint no older than the last that was published, and go on from it."""
    last = published(run)[-1]
    for steps_done, value in run_ranks(runs.go_on, 2, run, threads=1):
        assert steps_done == value >= last
    assert all(name[-8:].isdigit() for name in runs.folders(run))
    assert max(manifest.complete_checkpoints(run)) == steps_done + 1


def stand_still(run: Path) -> None:
    (run / "still").touch()
    time.sleep(600)


def save_until(run: Path, moment: str) -> None:
    """Save and save, and stand still at a moment of the fourth time."""
    chunks, sync, rmtree = tensor_file._chunks, files.sync, files.shutil.rmtree
    tensor_file.CHUNK_BYTES = 100_000

    def some_chunks(*args: Any) -> Iterator[memoryview]:
        for number, chunk in enumerate(chunks(*args)):
            if moment == "half of the tensors" and len(published(run)) >= 3 and number == 4:
                stand_still(run)
            yield chunk

    def sync_some(path: Path) -> None:
        sync(path)
        if moment == "the manifest, no name" and path.name == manifest.NAME:
            if len(published(run)) >= 3:
                stand_still(run)

    def remove_some(path: Path, **how: bool) -> None:
        if moment == "half removed" and path.suffix == manifest.REMOVED:
            if len(published(run)) >= 3:
                next(path.iterdir()).unlink()
                stand_still(run)
        rmtree(path, **how)

    tensor_file._chunks = some_chunks
    files.sync = sync_some
    files.shutil.rmtree = remove_some
    runs.save_for_ever(run)


@pytest.mark.parametrize(
    "moment", ["half of the tensors", by_hand("the manifest, no name"), by_hand("half removed")]
)
def test_a_kill_at_a_chosen_moment_of_saving(tmp_path: Path, moment: str) -> None:
    def kill() -> None:
        wait_for((tmp_path / "still").exists)
        for rank in range(2):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(save_until, 2, tmp_path, moment, threads=1)
    killer.join()
    left = runs.folders(tmp_path)
    assert any(name.endswith((PARTIAL, manifest.REMOVED)) for name in left)
    assert_nothing_is_lost(tmp_path)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_twice_until(run: Path, moment: str) -> None:
    """Save after the first step, and again after the same; be killed at a moment of the second."""
    become, unlink = files.publish_folder, Path.unlink
    runs.save_value(run, 1, 10)

    def become_or_die(partial: Path, final: Path) -> None:
        if moment == "no name":
            die()
        become(partial, final)
        if moment == "both names":
            die()

    def unlink_and_die(path: Path, **how: bool) -> None:
        unlink(path, **how)
        if moment == "the manifest removed" and path.name == manifest.NAME:
            die()

    files.publish_folder = become_or_die
    Path.unlink = unlink_and_die
    runs.save_value(run, 1, 20)


def resume_and_save(run: Path) -> tuple[int, dict[int, int], list[str]]:
    """Return the value that stands, each after saves of the same step and the next, and names."""
    stands = runs.value_of(manifest.find(run))
    runs.save_value(run, 1, 30)
    runs.save_value(run, 2, 40)
    later = {
        step: runs.value_of(folder) for step, folder in manifest.complete_checkpoints(run).items()
    }
    return stands, later, runs.folders(run)


@pytest.mark.parametrize(
    ("moment", "stands"),
    [("no name", 10), by_hand("both names", 20), by_hand("the manifest removed", 20)],
)
def test_a_kill_while_a_checkpoint_takes_the_name_of_another(
    tmp_path: Path, moment: str, stands: int
) -> None:
    """No older one stands."""
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(save_twice_until, 1, tmp_path, moment, threads=1)
    assert any(name.endswith(manifest.REMOVED) for name in runs.folders(tmp_path))
    folders = ["step-00000001", "step-00000002"]
    expected = stands, {1: 30, 2: 40}, folders
    assert run_ranks(resume_and_save, 1, tmp_path, threads=1) == [expected]


def rename_and_die(run: Path) -> None:
    """Be killed when the first of two checkpoints has lost its name, and nothing else."""
    rename = Path.rename
    runs.save_value(run, 1, 10)

    def and_die(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if target.suffix == manifest.REMOVED:
            die()
        return renamed

    Path.rename = and_die
    runs.save_value(run, 2, 20, keep=1)


def save_one_more(run: Path) -> list[str]:
    assert runs.value_of(manifest.find(run)) == 20
    runs.save_value(run, 3, 30, keep=1)
    return runs.folders(run)


@pytest.mark.slow
def test_a_kill_before_an_older_checkpoint_loses_its_manifest(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(rename_and_die, 1, tmp_path, threads=1)
    assert runs.folders(tmp_path) == ["step-00000001.removed", "step-00000002"]
    assert run_ranks(save_one_more, 1, tmp_path, threads=1) == [["step-00000003"]]


def test_of_a_checkpoint_that_is_a_link_the_link_alone_is_removed(tmp_path: Path) -> None:
    first, last = (manifest.folder_of(tmp_path / "run", step) for step in (1, 2))
    archive = tmp_path / "archive"
    for folder in (archive, last):
        folder.mkdir(parents=True)
        (folder / manifest.NAME).touch()
    first.symlink_to(archive)
    files.remove_older(tmp_path / "run", 1)
    assert runs.folders(tmp_path / "run") == ["step-00000002"]
    assert (archive / manifest.NAME).exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # twenty jobs are started from nothing
def test_a_kill_at_random_moments_of_saving(tmp_path: Path) -> None:
    draw = random.Random(0)
    num_within = 0
    for number in range(NUM_MOMENTS):
        run = tmp_path / str(number)
        run.mkdir()
        command = [sys.executable, runs.__file__, str(run)]
        job = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda run=run: len(published(run)) >= 3)
            time.sleep(draw.uniform(0, 0.5))
        finally:
            os.killpg(job.pid, signal.SIGKILL)  # the job, the server of its ranks, and the ranks
            job.wait()
        left = [Path(name).suffix for name in runs.folders(run)]
        num_within += PARTIAL in left or manifest.REMOVED in left
        assert_nothing_is_lost(run)
    assert num_within > NUM_MOMENTS / 2  # the moments were within a save, most of them
