"""No fork while another thread computes without the GIL."""

import hashlib
import sys
import threading

import pytest

from phalanx.comm.fork import await_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc of Linux")


def test_a_fork_waits_for_a_thread_that_computes() -> None:
    begun, done = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the GIL
        done.set()

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    while await_sleep(0.0):  # it waits for the GIL still
        assert not done.is_set()
    while not await_sleep(60.0):
        pass
    assert done.is_set()
    thread.join()


def test_a_fork_waits_for_no_thread_that_sleeps() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    while not await_sleep(60.0):
        pass
    assert thread.is_alive()
    ended.set()
    thread.join()
