"""No fork while another thread computes without the GIL."""

import hashlib
import sys
import threading

import pytest

from phalanx.comm import fork
from phalanx.comm.fork import await_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc of Linux")


def test_a_thread_that_computes_is_seen() -> None:
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # without the GIL

    thread = threading.Thread(target=compute)
    thread.start()
    while await_sleep(0.0):  # it has not started, or waits for the GIL between two calls
        pass
    ended.set()
    thread.join()


def test_a_fork_waits_until_the_other_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    awake = [True, True, False]
    monkeypatch.setattr(fork, "_is_another_awake", lambda: awake.pop(0))
    assert await_sleep(60.0)
    assert not awake


def test_a_fork_waits_for_no_thread_that_sleeps() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    while not await_sleep(60.0):
        pass
    assert thread.is_alive()
    ended.set()
    thread.join()
