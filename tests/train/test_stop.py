"""SIGTERM, SIGHUP and Ctrl-C: the step under way, a checkpoint, and the run goes on to the bit."""

import dataclasses
import getpass
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from subprocess import Popen

import pytest

from phalanx.checkpoint import manifest
from phalanx.checkpoint.saver import Saver
from phalanx.config import TrainConfig
from phalanx.errors import Interrupted, RankFailed, message_of
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks
from phalanx.launch.signals import ENDING
from phalanx.train import run
from phalanx.train.job.resolve import Job, resolve
from small_run import losses, small_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("stopped")
    return small_run(folder, steps=100_000, strategy="dp2", save="minutes=60")


@pytest.fixture(autouse=True)
def handlers() -> Generator[None]:
    """Under nohup, or in the background of a shell, signals are ignored, and stay so."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in ENDING}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def when(is_so: Callable[[], bool], act: Callable[[], None]) -> None:
    """Act in a thread once something is so."""

    def wait() -> None:
        deadline_s = time.monotonic() + 100
        while not is_so() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


def num_steps(run: Path) -> int:
    return len(losses(run)) if (run / "metrics.jsonl").exists() else 0


def interrupted(config: TrainConfig, signum: int, after: int) -> tuple[Interrupted, list[float]]:
    """Train until a signal comes after some steps; return how it ended, and its losses."""
    out = Path(config.out or "")
    when(lambda: num_steps(out) >= after, lambda: os.kill(os.getpid(), signum))
    with pytest.raises(Interrupted) as caught:
        run.train(config)
    return caught.value, losses(out)


def test_a_run_that_was_stopped_goes_on_to_the_bit(config: TrainConfig, tmp_path: Path) -> None:
    out = Path(config.out or "")
    error, before = interrupted(config, signal.SIGTERM, 5)
    (last,) = manifest.complete_checkpoints(out)
    assert last == len(before) >= 5
    assert str(error) == (
        f"interrupted by SIGTERM; step {last} of 100000 is done; last checkpoint: "
        f"{manifest.folder_of(out, last)}; resume by: phalanx train --resume {out}"
    )
    again = dataclasses.replace(config, resume=config.out)
    error, both = interrupted(again, signal.SIGHUP, last + 5)
    assert error.signum == signal.SIGHUP
    assert list(manifest.complete_checkpoints(out)) == [
        len(both)
    ]  # the one before was made to go on from it
    reference = dataclasses.replace(config, out=str(tmp_path))
    error, whole = interrupted(reference, signal.SIGINT, last + 5)
    assert str(error).startswith("interrupted; step ")
    assert both[: last + 5] == whole[: last + 5]


def stopped_in_the_last_save(job: Job) -> str:
    finish = Saver.finish

    def finish_late(self: Saver) -> None:
        PULSE.stop_signal = signal.SIGTERM
        finish(self)

    Saver.finish = finish_late
    return type(run.train_rank(job)).__name__


def test_a_signal_in_the_last_save_of_a_finished_run_takes_no_summary(
    config: TrainConfig, tmp_path: Path
) -> None:
    job = resolve(dataclasses.replace(config, out=str(tmp_path), steps=2, strategy="dp1"))
    assert run_ranks(stopped_in_the_last_save, 1, job, threads=1) == ["Summary"]


def test_a_killed_rank_says_how_to_go_on(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolve(dataclasses.replace(config, out=str(tmp_path)))

    def fail(*args: object, **options: object) -> None:
        raise RankFailed(1, "ended by SIGKILL")

    monkeypatch.setattr(run, "run_ranks", fail)
    with pytest.raises(RankFailed) as caught:
        run.start(job)
    assert message_of(caught.value).endswith(f"\nthere is no checkpoint in {tmp_path} yet")
    last = manifest.folder_of(tmp_path, 4)
    last.mkdir(parents=True)
    (last / manifest.NAME).touch()
    with pytest.raises(RankFailed) as caught:
        run.start(job)
    on = f"last checkpoint: {last}; resume by: phalanx train --resume {tmp_path}"
    assert message_of(caught.value).splitlines()[-1] == on


def in_terminal(config: TrainConfig, out: Path, **environment: str) -> tuple[Popen[bytes], int]:
    """Start a run in a terminal of its own; return the process, and the terminal's other end."""
    shape = {k: v for k, v in dataclasses.asdict(config.shape).items() if v is not None}
    command = [
        *(sys.executable, "-m", "phalanx", "train", "--steps=100000", "--strategy=dp2"),
        *(f"--data={config.data}", f"--corpus.cache={config.corpus.cache}", "--device=cpu"),
        *(
            f"--shape.{name.replace('_', '-')}={value}"
            for name, value in shape.items()
            if name != "tied"
        ),
        *("--corpus.seq-len=24", "--corpus.validation=0.1", f"--out={out}"),
    ]
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, **environment, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    return job, ours


@pytest.mark.slow
def test_a_closed_terminal_is_a_sighup(config: TrainConfig, tmp_path: Path) -> None:
    job, ours = in_terminal(config, tmp_path)
    while num_steps(tmp_path) < 3 and select.select([ours], [], [], 100)[0]:
        os.read(ours, 65536)
    os.close(ours)  # as of a job that the shell has disowned: no signal comes
    assert job.wait(100) == 128 + signal.SIGHUP
    assert list(manifest.complete_checkpoints(tmp_path)) == [num_steps(tmp_path)]


@pytest.mark.slow
def test_a_terminal_gets_its_cursor_back_and_the_temporary_folder_is_as_it_was(
    config: TrainConfig, tmp_path: Path
) -> None:
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's is too long for a socket's name
    kept = temporary / "phalanx-checkpoints" / ".lock"
    kept.parent.mkdir()
    kept.touch()
    os.utime(kept.parent, (0, 0))
    job, ours = in_terminal(config, tmp_path / "run", TMPDIR=str(temporary))
    when(lambda: num_steps(tmp_path / "run") >= 3, lambda: os.killpg(job.pid, signal.SIGTERM))
    shown = b""
    while select.select([ours], [], [], 100)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the terminal is closed
            break
    assert job.wait(30) == 128 + signal.SIGTERM, shown.decode()
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0
    words = " ".join(shown.decode().split())  # the terminal is 100 columns wide
    assert words.count("resume by: phalanx train --resume") == 1
    assert b"Traceback" not in shown
    # Neither more than the compiler's cache, which torch makes, nor less than was there.
    left = {path.name for path in temporary.iterdir()}
    assert left - {f"torchinductor_{getpass.getuser()}"} == {"phalanx-checkpoints"}
    assert kept.exists()
    shutil.rmtree(temporary)
