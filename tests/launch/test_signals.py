"""Signals to all processes of a job: its parent decides, and no process outlives the forkserver."""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from typing import Any

import pytest

from phalanx.launch import local
from phalanx.launch.local import run_ranks
from phalanx.launch.signals import ENDING, end_with_server

pytestmark = pytest.mark.fresh_ranks


def test_the_forkserver_disregards_signals_that_end_the_processes_it_forks() -> None:
    context = local.prepare_server()
    server: Any = vars(forkserver)["_forkserver"]
    first = context.Process(target=os.getpid)
    first.start()
    first.join()  # the forkserver has started
    pid = server._forkserver_pid
    for signum in ENDING:
        os.kill(pid, signum)
    process = context.Process(target=time.sleep, args=(1000,))
    process.start()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    assert server._forkserver_pid == pid  # no other was started


def fork_and_return_mask() -> set[int]:
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_no_signal_stays_blocked_after_a_rank_has_forked() -> None:
    assert run_ranks(fork_and_return_mask, 1) == [set()]


def fork_and_wait(connection: Any) -> None:
    if os.fork() == 0:
        end_with_server()
        connection.send("ready")
    while True:
        signal.pause()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_process_that_hangs_ends_with_the_one_that_forked_it() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=fork_and_wait, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    process.kill()
    with pytest.raises((EOFError, ConnectionResetError)):
        ours.recv()
