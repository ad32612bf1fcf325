"""Each rank keeps what it prints, and the screen shows what the first prints."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.errors import CheckpointError, RankFailed
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_log import kept, screen

pytestmark = pytest.mark.fresh_ranks


def lines_of(run: Path, rank: int) -> list[str]:
    return (run / "logs" / f"rank-{rank}.log").read_text().splitlines()


def print_and_fail(run: Path, ends: bool) -> bool:
    rank = dist.get_rank()
    stdout = sys.stdout
    try:
        with kept(run, rank):
            sys.stdout.write(f"printed by {rank}\n")
            os.system(f"echo started by {rank}; echo error of {rank} >&2")
            if rank == 1 and ends:
                PULSE.on_change()
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("an error")
    except ValueError:
        return sys.stdout is stdout and screen() is sys.stderr


def test_a_rank_keeps_what_it_and_its_programs_print_and_its_error(tmp_path: Path) -> None:
    assert run_ranks(print_and_fail, 2, tmp_path, False) == [True, True]
    assert run_ranks(print_and_fail, 2, tmp_path, False) == [True, True]  # as a run that resumes
    lines = lines_of(tmp_path, 1)
    half = lines[: len(lines) // 2]
    assert half[0].startswith("--- ") and " rank 1, process " in half[0]
    assert half[1:4] == ["printed by 1", "started by 1", "error of 1"]
    assert half[-1] == "ValueError: an error"
    assert lines[len(half) + 1 :] == half[1:]
    first = lines_of(tmp_path, 0)
    assert "printed by 0" in first and first[-1] == "ValueError: an error"


def test_a_rank_that_is_killed_has_printed_what_it_said_and_its_log_is_named(
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "rank-1.log"
    with pytest.raises(RankFailed, match=f"SIGKILL, without .*; its output is in {log}$"):
        run_ranks(print_and_fail, 2, tmp_path, True)
    assert lines_of(tmp_path, 1)[1:] == ["printed by 1", "started by 1", "error of 1"]


def test_the_first_rank_shows_all_and_keeps_what_a_terminal_does_not_erase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ["a line\n", "\r\x1b[2Kbar 1", "\r\x1b[2K\x1b[1mabove\x1b[0m\nbar 2", "\nend\n"]
    with kept(tmp_path, 0):
        for text in shown:
            sys.stdout.write(text)
    assert capsys.readouterr().out == "".join(shown)
    assert lines_of(tmp_path, 0)[1:] == ["a line", "above", "", "end"]


def test_what_threads_say_of_another_rank_comes_to_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with kept(tmp_path, 1):
        os.write(2, b"a library\n")
        screen().write("who is lost\n")
    os.write(2, b"its last words\n")
    assert capfd.readouterr().err == "who is lost\nits last words\n"
    assert lines_of(tmp_path, 1)[1:] == ["a library"]


def test_no_log_is_written_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "logs").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="logs is a link"):
        with kept(tmp_path, 1):
            pass
    assert list(elsewhere.iterdir()) == []


PRINTS: str = """
import sys
from phalanx.launch.rank_log import LOST_OUTPUT, keep_printing
from phalanx.launch.signals import collected
stdout, terminal = sys.stdout, sys.argv[1:] == ["terminal"]
keep_printing()
with collected() as signals:
    while not (signals if terminal else LOST_OUTPUT):
        print("a line", file=stdout, flush=True)
    print("an error", file=sys.stderr)
    sys.exit(len(signals))
"""


def test_a_full_disk_mutes_the_output_and_a_closed_terminal_also_asks_once_to_stop() -> None:
    command = [sys.executable, "-c", PRINTS]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 0
    ours, theirs = pty.openpty()
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    job = subprocess.Popen([*command, "terminal"], start_new_session=True, **terminal)
    os.close(theirs)
    assert os.read(ours, 6) == b"a line"
    os.close(ours)
    assert job.wait(100) == 1
