"""A rank that stands still while a checkpoint is written is named, and the save ends in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch.distributed as dist

from marks import by_hand
from phalanx.checkpoint import files, manifest, progress, saver, tensor_file
from phalanx.checkpoint.saver import Saver
from phalanx.comm import join
from phalanx.errors import CheckpointError, PeerLost, TrainingError
from phalanx.launch.failure import is_lost_peer
from phalanx.launch.local import run_ranks

TIMEOUT_S = 1.0


def end_soon(saver_: Saver, rank: int) -> None:
    """Shorten the timeout of the next save, in which `rank` stands still.

    Rank 0 names another rank once its own file is written, however long that takes.
    """
    saver_._progress.timeout_s = TIMEOUT_S
    progress.GRACE_S = 1.0 if rank in (0, dist.get_rank()) else 60.0


def stand_still(rank: int) -> None:
    """Have the writer of a rank never come to its first byte."""
    if dist.get_rank() == rank:
        saver._write_file = lambda *_: threading.Event().wait()


def words_of_stuck(run: Path, rank: int, hold: Callable[[int], None]) -> str:
    """Save, then save again with a rank that stands still; return what is said."""
    model, optimizer = runs.build()
    with Saver(run) as saver_:
        saver_.begin(model, optimizer, runs.about(1))
        saver_.finish()
        end_soon(saver_, rank)
        hold(rank)
        saver_.begin(model, optimizer, runs.about(2))
        with pytest.raises(CheckpointError) as raised:
            saver_.finish()
        saver_.finish()  # it was said
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [by_hand(0), 1])
def test_a_rank_that_does_not_write_is_named_in_time(tmp_path: Path, rank: int) -> None:
    """Of rank 0, which decides, the others can say no more than that it says nothing."""
    outcomes = run_ranks(words_of_stuck, 2, tmp_path, rank, stand_still, threads=1, timeout_s=60)
    final = tmp_path / "checkpoints" / "step-00000002"
    for number, words in enumerate(outcomes):
        assert words.startswith(
            f"cannot save {final} (the last checkpoint is {manifest.find(tmp_path)}): "
        )
        if rank == 1 and number == 0:
            assert words.endswith(
                "rank 1 had not written its shards (0 bytes so far) and made no progress for 1 s"
            )
        if rank == 0 and number == 1:
            assert "rank 0, which publishes the checkpoint, made no progress for " in words
    assert list(manifest.complete_checkpoints(tmp_path)) == [1]


def save_after_a_stuck_one(run: Path, rank: int) -> None:
    """Save three times; a rank is stuck in the second save until it writes the third."""
    progress.GRACE_S = 0.5
    model, optimizer = runs.build("fsdp")
    write_file, has_begun = saver._write_file, threading.Event()
    writers: list[threading.Thread] = []

    def write(save: Any, of: Any) -> Any:
        is_stuck = dist.get_rank() == rank
        if is_stuck and save.about.steps_done == 3:
            has_begun.set()
            writers[1].join(60)  # whatever it reports now is not of this save
            assert not writers[1].is_alive()
        found = write_file(save, of)
        if is_stuck and save.about.steps_done == 2:
            assert has_begun.wait(60)
        return found

    saver._write_file = write
    with Saver(run, keep=1) as saver_:
        for steps_done, timeout_s in ((1, 60), (2, 0.5), (3, 60)):
            dist.barrier()
            runs.step(model, optimizer)
            saver_._progress.timeout_s = timeout_s
            saver_.begin(model, optimizer, runs.about(steps_done))
            assert saver_._thread is not None
            writers.append(saver_._thread)
            if steps_done == 2:
                with pytest.raises(CheckpointError, match="made no progress"):
                    saver_.finish()
            else:
                saver_.finish()


@pytest.mark.parametrize("rank", [by_hand(0), 1])
def test_a_writer_that_was_given_up_reports_nothing_for_the_next_save(
    tmp_path: Path, rank: int
) -> None:
    run_ranks(save_after_a_stuck_one, 2, tmp_path, rank, threads=1)
    assert list(manifest.complete_checkpoints(tmp_path)) == [3]
    files.verify(manifest.find(tmp_path), manifest.read(manifest.find(tmp_path)))


def limit_of_a_save(run: Path) -> float:
    with Saver(run) as saver_:
        return saver_._progress.timeout_s


def test_a_save_may_make_no_progress_for_as_long_as_a_collective_of_the_job_waits(
    tmp_path: Path,
) -> None:
    assert run_ranks(limit_of_a_save, 2, tmp_path, threads=1, timeout_s=77) == [77, 77]


def slow_disk(rank: int) -> None:
    """Have a disk take longer for a file than a save may stand still, but go on."""
    chunks = tensor_file._chunks
    tensor_file.CHUNK_BYTES = 50

    def slowly(*args: Any) -> Any:
        for number, chunk in enumerate(chunks(*args)):
            time.sleep(1.0 if number < 5 else 0)
            yield chunk

    if dist.get_rank() == rank:
        tensor_file._chunks = slowly


def save_slowly(run: Path, rank: int) -> None:
    model, optimizer = runs.build()
    slow_disk(rank)
    with Saver(run, timeout_s=4.0) as saver_:  # less than the file takes, far more than a part
        saver_.begin(model, optimizer, runs.about(1))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_disk_is_waited_for(tmp_path: Path, rank: int) -> None:
    run_ranks(save_slowly, 2, tmp_path, rank, threads=1, timeout_s=60)
    assert list(manifest.complete_checkpoints(tmp_path)) == [1]


def lateness_of_syncs(run: Path) -> list[bool]:
    """Save on a disk that takes nearly the timeout for each sync, by a clock of its own.

    Return after each sync whether the save is late.
    """
    model, optimizer = runs.build()
    now_s, is_late, fsync = 0.0, list[bool](), os.fsync
    progress.time = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    with Saver(run, timeout_s=10.0) as saver_:

        def sync(descriptor: int) -> None:
            nonlocal now_s
            fsync(descriptor)
            now_s += 0.9 * (10.0 + progress.GRACE_S)
            is_late.append(saver_._progress.is_late)

        os.fsync = sync
        saver_.begin(model, optimizer, runs.about(1))
    return is_late


def test_each_sync_of_a_checkpoint_is_progress(tmp_path: Path) -> None:
    """Of the tensors, the index, the manifest, and the two folders."""
    assert run_ranks(lateness_of_syncs, 1, tmp_path, threads=1) == [5 * [False]]


def stop_while_writing(run: Path, rank: int) -> None:
    """Stop the process of a rank while it writes; only the others can say so."""
    progress.GRACE_S = 1.0 if rank == 0 else 60.0
    model, optimizer = runs.build()

    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # the thread may go on for a moment

    if dist.get_rank() == rank:
        saver._write_file = stop
    with Saver(run, timeout_s=TIMEOUT_S) as saver_:
        saver_.begin(model, optimizer, runs.about(1))


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        by_hand(1, "rank 1 had not written its shards"),
        (0, "rank 0, which publishes the checkpoint, made no progress for "),
    ],
)
def test_a_stopped_process_ends_the_job(tmp_path: Path, rank: int, words: str) -> None:
    """Rank 0 holds the store, too, which then answers nobody."""
    with pytest.raises(CheckpointError, match=words) as raised:
        run_ranks(stop_while_writing, 2, tmp_path, rank, threads=1, timeout_s=60)
    assert "(this run has no checkpoint yet)" in str(raised.value)
    assert not manifest.complete_checkpoints(tmp_path)


ENDED = "the run of rank 0 has ended"


def end_while_writing(run: Path, error: Exception, silent_s: float | None) -> tuple[str, list[str]]:
    """Have the training of rank 0 end by an error while rank 1 does not write for some time.

    None: rank 1 does not write before rank 0 has ended.
    """
    progress.LOST_TIMEOUT_S, progress.GRACE_S = (60.0 if silent_s == 0 else 0.5), 60.0
    model, optimizer = runs.build()
    write_file = saver._write_file

    def wait_and_write(*args: Any) -> Any:
        if silent_s is None:
            join.job_store().wait([ENDED])
        else:
            time.sleep(silent_s)
        return write_file(*args)

    if dist.get_rank() == 1:
        saver._write_file = wait_and_write
    with pytest.raises((CheckpointError, PeerLost, TrainingError)) as raised:
        with Saver(run, timeout_s=600) as saver_:
            saver_.begin(model, optimizer, runs.about(1))
            if dist.get_rank() == 0:
                raise error
            saver_.finish()
            raise TrainingError("it is saved")
    if dist.get_rank() == 0:
        join.job_store().set(ENDED, "")
    words = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    return type(raised.value).__name__, words


@pytest.mark.parametrize(
    ("error", "silent_s", "is_saved"),
    [
        (PeerLost("rank 1 has left"), None, False),
        (PeerLost("rank 1 has left"), 0.0, True),
        (TrainingError("the loss is nan"), 1.5, True),  # longer than a lost rank is waited for
    ],
)
def test_a_lost_rank_is_not_waited_for_and_any_other_is(
    tmp_path: Path, error: Exception, silent_s: float | None, is_saved: bool
) -> None:
    (kind, words), (kind_1, words_1) = run_ranks(
        end_while_writing, 2, tmp_path, error, silent_s, threads=1, timeout_s=60
    )
    assert (kind, words[0]) == (type(error).__name__, str(error))
    assert list(manifest.complete_checkpoints(tmp_path)) == ([1] if is_saved else [])
    if is_saved:
        assert words[1:] == [] and words_1 == ["it is saved"]
    else:
        assert words[1].endswith("(0 bytes so far) and made no progress for 0.5 s")
        assert (kind_1, words_1) == ("PeerLost", words[1:])


class Gone:
    """A store whose rank has left."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")


def words_without_store(run: Path) -> tuple[str, bool]:
    progress.GRACE_S = 60.0
    model, optimizer = runs.build()
    saver_ = Saver(run, timeout_s=TIMEOUT_S)
    if dist.get_rank() == 1:
        saver_._progress._store = Gone()
    with pytest.raises((CheckpointError, PeerLost)) as raised:
        saver_.begin(model, optimizer, runs.about(1))
        saver_.finish()
    return str(raised.value), is_lost_peer(raised.value)


def test_a_store_that_has_gone_is_a_lost_rank(tmp_path: Path) -> None:
    first, other = run_ranks(words_without_store, 2, tmp_path, threads=1, timeout_s=60)
    assert "rank 1 had not written its shards" in first[0] and not first[1]
    assert "the job's store on rank 0 cannot be reached: DistNetworkError: Conn" in other[0]
    assert other[1]
