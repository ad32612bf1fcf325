"""Saving while the run goes on: what may happen meanwhile, and what is left when it ends badly."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist

from phalanx import storage
from phalanx.checkpoint import files, index, lock, manifest, saver, state, untrusted
from phalanx.checkpoint.saver import Saver
from phalanx.errors import CheckpointError, TrainingError
from phalanx.launch.local import run_ranks


def hold_writing() -> threading.Event:
    """Have the writer of this rank wait before its first tensor."""
    event = threading.Event()
    write_file = saver._write_file

    def wait(*args: Any) -> Any:
        assert event.wait(60)
        return write_file(*args)

    saver._write_file = wait
    return event


def fail_writing(rank: int) -> None:
    """Have a rank find no room for any byte."""
    if dist.get_rank() == rank:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))


def step_while_writing(run: Path) -> tuple[bool, bool, float]:
    """Change everything, and use the job's own collectives, while a checkpoint is written."""
    model, optimizer = runs.build("fsdp", width=64)
    runs.step(model, optimizer)
    event = hold_writing()
    with Saver(run) as saver_:
        saver_.begin(model, optimizer, runs.about(1))
        expected = runs.whole_state(model, optimizer)
        runs.step(model, optimizer)
        saver_.poll()
        was_writing = saver_.is_writing
        event.set()
        for _ in range(200):
            ones = torch.ones(1000)
            dist.all_reduce(ones)
            total = float(ones.sum())
    loaded, loaded_optimizer = runs.build("fsdp", width=64)
    state.load(manifest.find(run), loaded, loaded_optimizer)
    actual = runs.whole_state(loaded, loaded_optimizer)
    same = all(torch.equal(actual[name], expected[name]) for name in expected)
    return was_writing, same, total


def test_the_run_goes_on_while_its_state_is_written(tmp_path: Path) -> None:
    for was_writing, same, total in run_ranks(step_while_writing, 2, tmp_path, threads=1):
        assert was_writing and same and total == 2000


def many_saves(run: Path) -> None:
    """Save three times with the same buffers, with collectives of the job meanwhile."""
    model, optimizer = runs.build()
    with Saver(run, keep=2) as saver_:
        for steps_done in range(1, 4):
            runs.step(model, optimizer)
            saver_.begin(model, optimizer, runs.about(steps_done))
            place = saver_._copy._buffer.data_ptr()
            for _ in range(50):
                dist.all_reduce(torch.ones(10))
        assert saver_._copy._buffer.data_ptr() == place


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    run_ranks(many_saves, 2, tmp_path, threads=1)
    assert runs.folders(tmp_path) == ["step-00000002", "step-00000003"]


def saves_by_the_clock(run: Path) -> list[str]:
    """Save after steps 1 to 6; those after 2 and 5 last."""
    model, optimizer = runs.build()
    with Saver(run) as saver_:
        for steps_done in range(1, 7):
            is_passing = steps_done not in (2, 5)
            about = dataclasses.replace(runs.about(steps_done), is_passing=is_passing)
            saver_.begin(model, optimizer, about)
    return runs.folders(run)


def test_one_by_the_clock_is_replaced_by_the_next(tmp_path: Path) -> None:
    (names,) = run_ranks(saves_by_the_clock, 1, tmp_path, threads=1)
    assert names == ["step-00000002", "step-00000005", "step-00000006"]
    assert manifest.temporary_checkpoints(tmp_path) == [manifest.folder_of(tmp_path, 6)]


def save_by(way: str, run: Path, rank: int) -> list[str]:
    """Save on a full disk; say what was raised when."""
    model, optimizer = runs.build()
    words: list[str] = []
    saver_ = Saver(run)
    fail_writing(rank)
    saver_.begin(model, optimizer, runs.about(5))
    while saver_.is_writing:
        time.sleep(0.01)
    try:
        if way == "begin":
            saver_.begin(model, optimizer, runs.about(6))
        else:
            {"poll": saver_.poll, "finish": saver_.finish}[way]()
    except CheckpointError as error:
        words.append(str(error))
    saver_.finish()  # it was said, and there is nothing else
    return words


@pytest.mark.parametrize("way", ["begin", "poll", "finish"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_goes_wrong_is_said_once_on_every_rank(tmp_path: Path, way: str, rank: int) -> None:
    run_ranks(runs.save_after, 2, tmp_path, 2, threads=1)
    for words in run_ranks(save_by, 2, way, tmp_path, rank, threads=1, timeout_s=30):
        partial = tmp_path / "checkpoints" / "step-00000005.partial"
        assert words == [
            f"cannot save {partial.with_suffix('')} "
            f"(the last checkpoint is {manifest.find(tmp_path)}): "
            f"{partial / f'rank-0000{rank}.safetensors'}: File too large"
        ]
    assert runs.folders(tmp_path) == ["step-00000002"]


def words_of_broken_writer(run: Path, rank: int) -> str:
    """Save where the writer of a rank meets what no save should meet."""
    model, optimizer = runs.build()

    def break_down(*_: Any) -> None:
        raise RuntimeError("can't start new thread\nat all")

    if dist.get_rank() == rank:
        saver._write_file = break_down
    try:
        with Saver(run) as saver_:
            saver_.begin(model, optimizer, runs.about(1))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_the_writer_meets_is_said_at_once(tmp_path: Path, rank: int) -> None:
    """Not after the ten minutes in which a save may stand still."""
    final = manifest.folder_of(tmp_path, 1)
    for words in run_ranks(words_of_broken_writer, 2, tmp_path, rank, threads=1, timeout_s=30):
        assert words == (
            f"cannot save {final} (this run has no checkpoint yet): "
            "RuntimeError: can't start new thread"
        )
    assert runs.folders(tmp_path) == []


def words_of_complex(run: Path) -> list[str]:
    """Reserve memory for, and save, what no file of ours can hold."""
    model, _ = runs.build()
    model.middle.weight = torch.nn.Parameter(torch.zeros(5, 5, dtype=torch.complex64))
    optimizer = torch.optim.AdamW(model.middle.parameters())
    words: list[str] = []
    with Saver(run) as saver_:
        for work in (
            lambda: saver_.reserve(model, optimizer),
            lambda: saver_.begin(model, optimizer, runs.about(1)),
        ):
            with pytest.raises(CheckpointError) as raised:
                work()
            words.append(str(raised.value))
    return words


def test_a_data_type_that_files_do_not_know_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for words in run_ranks(words_of_complex, 2, tmp_path, threads=1, timeout_s=30):
        expected = "cannot save model.middle.weight: its dtype is torch.complex64; expected one "
        assert all(line.startswith(expected) and "torch.bfloat16" in line for line in words)
    assert runs.folders(tmp_path) == []


def words_of_large_index(run: Path) -> str:
    untrusted.MAX_JSON_BYTES = 1000
    return runs.words_of_save(run, 1)


def test_an_index_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    for words in run_ranks(words_of_large_index, 2, tmp_path, threads=1, timeout_s=30):
        assert re.search(
            r"index.json would have 1,\d+ bytes and \d+ values, but at most 1,000 bytes and ",
            words,
        )
    assert runs.folders(tmp_path) == []


def raise_while_writing(run: Path, rank: int | None, is_disk_full: bool) -> None:
    """Fail in training while a checkpoint is written, on one rank or on all."""
    model, optimizer = runs.build()
    event = hold_writing()
    with Saver(run) as saver_:
        if is_disk_full:
            fail_writing(0)
        saver_.begin(model, optimizer, runs.about(1))
        event.set()
        if rank is None or dist.get_rank() == rank:
            raise TrainingError("the loss is nan")
        dist.barrier()


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("is_disk_full", [False, True])
def test_an_error_of_the_training_leaves_the_save_whole_or_nothing(
    tmp_path: Path, rank: int | None, is_disk_full: bool
) -> None:
    with pytest.raises(TrainingError, match="the loss is nan") as raised:
        run_ranks(raise_while_writing, 2, tmp_path, rank, is_disk_full, threads=1, timeout_s=30)
    assert ("File too large" in str(raised.value)) == is_disk_full
    names = runs.folders(tmp_path)
    assert names == ([] if is_disk_full else ["step-00000001"])


def test_a_save_that_failed_as_well_is_told_under_torchrun() -> None:
    code = (
        "from phalanx.errors import TrainingError\n"
        "from phalanx.launch.torchrun import leave_failed\n"
        "error = TrainingError('the loss is nan')\n"
        "error.add_note('cannot save step 5')\n"
        "leave_failed(error)"
    )
    environment = {**os.environ, "RANK": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.stderr == "rank 0: the loss is nan\ncannot save step 5\n"


def test_a_whole_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    run_ranks(runs.save_after, 2, tmp_path, 2, threads=1)
    before = (manifest.find(tmp_path) / manifest.NAME).read_bytes()
    for words in run_ranks(runs.words_of_save, 2, tmp_path, 2, threads=1):
        assert words.endswith("there is one of that name already")
    assert (manifest.find(tmp_path) / manifest.NAME).read_bytes() == before


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    for name in ("step-00000001.partial", "step-00000002.partial", "step-00000000.removed"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints" / "step-00000002").mkdir()  # without a manifest
    users = ["backup.removed", "step-00000003", "step-00000004.removed"]
    for name in users:
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "notes.txt").touch()
    run_ranks(runs.save_after, 1, tmp_path, 2, threads=1)
    assert runs.folders(tmp_path) == sorted(["step-00000002", *users])
    (words,) = run_ranks(runs.words_of_save, 1, tmp_path, 3, threads=1)
    assert words.endswith("there is a folder of that name with other files; move it away")
    assert (tmp_path / "checkpoints" / "step-00000003" / "notes.txt").exists()
    assert run_ranks(runs.words_of_load, 1, manifest.find(tmp_path), threads=1) == [("", "")]


def save_and_hold(run: Path) -> None:
    """Save and wait with the saver open until another job has tried to save."""
    model, optimizer = runs.build()
    with Saver(run, keep=1) as saver_:
        saver_.begin(model, optimizer, runs.about(3))
        partial = run / "checkpoints" / "step-00000009.partial"
        saver_.finish()
        partial.mkdir()  # as if it went on to save
        (run / "is-held").touch()
        while not (run / "was-tried").exists():
            time.sleep(0.01)
        assert partial.exists()


def words_of_second_job(run: Path) -> str:
    lock.LOCK_WAIT_S = 0.2
    model, optimizer = runs.build()
    try:
        with Saver(run, keep=1) as saver_:
            saver_.begin(model, optimizer, runs.about(4))
    except CheckpointError as error:
        return str(error)
    return ""


def test_two_jobs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(run_ranks, save_and_hold, 1, tmp_path, threads=1)
        while not (tmp_path / "is-held").exists() and not holder.done():
            time.sleep(0.01)
        try:
            (words,) = run_ranks(words_of_second_job, 1, tmp_path, threads=1)
        finally:
            (tmp_path / "was-tried").touch()
        holder.result()
    folder = tmp_path / "checkpoints"
    assert words == (
        f"cannot save in {tmp_path}: another process saves to {folder}; wait until it has ended, "
        "or give another --out"
    )
    assert list(manifest.complete_checkpoints(tmp_path)) == [3]
    assert run_ranks(words_of_second_job, 1, tmp_path, threads=1) == [""]  # it has ended
    assert list(manifest.complete_checkpoints(tmp_path)) == [4]


def words_in_own_folder(run: Path) -> str:
    return words_of_saver(run / str(dist.get_rank()))


def words_of_full_disk(run: Path) -> str:
    fail_writing(0)
    return words_of_saver(run)


def words_of_saver(run: Path) -> str:
    lock.LOCK_WAIT_S = 0.2
    try:
        Saver(run)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_disk_that_is_full_at_the_start_is_one_error_on_every_rank(tmp_path: Path) -> None:
    for words in run_ranks(words_of_full_disk, 2, tmp_path, threads=1):
        lock = tmp_path / "checkpoints" / manifest.LOCK
        assert words == f"cannot save in {tmp_path}: {lock}: File too large"


def test_a_folder_that_hosts_do_not_share_is_refused_at_the_start(tmp_path: Path) -> None:
    for words in run_ranks(words_in_own_folder, 2, tmp_path, threads=1):
        assert f"{tmp_path / '1' / 'checkpoints'} on " in words
        assert "is not the folder that rank 0 writes to; give an --out on a disk" in words


def test_a_checkpoint_without_all_its_files_is_not_published(tmp_path: Path) -> None:
    partial, final = tmp_path / "step-00000001.partial", tmp_path / "step-00000001"
    partial.mkdir()
    about = dataclasses.replace(runs.ABOUT, files={"rank-00001.safetensors": (8, "0" * 64)})
    with pytest.raises(
        CheckpointError, match=r"rank-00001\.safetensors is not in .*all hosts share"
    ):
        files.publish(partial, final, about)
    assert not final.exists()


def test_a_disk_that_refuses_leaves_the_checkpoint_that_was_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is full tells when a folder is to be on it."""
    final = manifest.folder_of(tmp_path, 1)
    files.publish(files.make_partial(final), final, runs.ABOUT)
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    partial = files.make_partial(final, replaces=True)
    with pytest.raises(OSError, match="No space left"):
        files.publish(partial, final, runs.ABOUT)
    assert manifest.complete_checkpoints(tmp_path) == {1: final}


def save_without_locks(run: Path) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    storage.fcntl = SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4)
    runs.save_after(run, 1)


def test_a_run_is_saved_where_a_disk_has_no_locks(tmp_path: Path) -> None:
    run_ranks(save_without_locks, 1, tmp_path, threads=1)
    assert list(manifest.complete_checkpoints(tmp_path)) == [1]


def syncs(run: Path) -> dict[str, int]:
    """Save; return the most bytes of each file that were there when it was synced, by name."""
    bytes_of: dict[str, int] = {}
    fsync = os.fsync

    def note(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        bytes_of[name] = max(bytes_of.get(name, 0), os.fstat(descriptor).st_size)
        fsync(descriptor)

    os.fsync = note
    runs.save_after(run, 1)
    return bytes_of


@pytest.mark.skipif(sys.platform != "linux", reason="a descriptor's name is read from /proc")
def test_every_file_is_synced_whole(tmp_path: Path) -> None:
    first, second = run_ranks(syncs, 2, tmp_path, threads=1)
    synced = first | second
    folder = manifest.find(tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert names == {"rank-00000.safetensors", "rank-00001.safetensors", index.NAME, manifest.NAME}
    assert {name: synced.get(name) for name in names} == {
        name: (folder / name).stat().st_size for name in names
    }
    assert synced.keys() == {*names, f"{folder.name}.partial", "checkpoints", manifest.LOCK}


def words_of_broken_removal(run: Path) -> str:
    def break_down(*_: Any) -> None:
        raise RuntimeError("not an error of the disk")

    if dist.get_rank() == 0:
        saver.remove_older = break_down
    return runs.words_of_save(run, 1)


def test_an_error_after_the_checkpoint_is_complete_is_raised_on_every_rank(tmp_path: Path) -> None:
    final = manifest.folder_of(tmp_path, 1)
    assert run_ranks(words_of_broken_removal, 2, tmp_path, threads=1, timeout_s=30) == 2 * [
        f"cannot save {final} (the last checkpoint is {final}): "
        "RuntimeError: not an error of the disk"
    ]


def save_beside_what_cannot_be_removed(run: Path) -> list[str]:
    """Save twice where no folder can be removed, then once more where they can."""
    model, optimizer = runs.build()

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    rmtree, files.shutil.rmtree = files.shutil.rmtree, refuse
    with Saver(run, keep=1) as saver_:
        for steps_done in (1, 2):
            saver_.begin(model, optimizer, runs.about(steps_done))
            saver_.finish()
        left = manifest.complete_checkpoints(run)
        files.shutil.rmtree = rmtree
        saver_.begin(model, optimizer, runs.about(3))
    assert list(left) == [2]
    return runs.folders(run)


def test_what_cannot_be_removed_waits_for_the_next_save(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / "step-00000002.partial"
    leftover.mkdir(parents=True)
    (leftover / "rank-00000.safetensors").write_bytes(b"half")
    (names,) = run_ranks(save_beside_what_cannot_be_removed, 1, tmp_path, threads=1)
    assert names == ["step-00000003"]


def test_a_disk_that_cannot_list_checkpoints_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Path) -> list[Path]:
        raise OSError(errno.EIO, "Input/output error", str(run))

    monkeypatch.setattr(manifest, "temporary_checkpoints", refuse)
    files.remove_older(tmp_path, 1)


def nicenesses(run: Path) -> tuple[int, int]:
    """Return how far the writer and the main thread of this rank stand back."""
    seen: list[int] = []
    write_file = saver._write_file

    def look(*args: Any) -> Any:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write_file(*args)

    saver._write_file = look
    runs.save_after(run, 1)
    return seen[0], os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a thread's priority is Linux's")
def test_the_writer_alone_stands_back(tmp_path: Path) -> None:
    for writer, main in run_ranks(nicenesses, 2, tmp_path, threads=1):
        assert writer == min(19, main + saver.NICENESS)


def refused_optimizers(run: Path) -> list[str]:
    model, _ = runs.build()
    foreign = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    odd = torch.optim.AdamW(model.middle.parameters())
    odd.state[model.middle.weight]["count"] = 3
    words: list[str] = []
    for optimizer in (foreign, odd):
        try:
            Saver(run).begin(model, optimizer, runs.about(1))
        except CheckpointError as error:
            words.append(str(error))
    return words


def test_an_optimizer_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    (words,) = run_ranks(refused_optimizers, 1, tmp_path, threads=1)
    assert words == [
        "the optimizer updates a parameter that is not in the model",
        "the optimizer's count of middle.weight is 3; only tensors can be saved",
    ]


def test_a_folder_whose_digits_are_of_another_script_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step-٣", "step-00000002"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / manifest.NAME).touch()
    assert list(manifest.complete_checkpoints(tmp_path)) == [2]
