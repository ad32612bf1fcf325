"""The pipe between the parent and a rank that it started.

    rank -> parent    ("result", value) or ("failure", Failure), once
    parent -> rank    the number of a signal that asks it to stop; LEAVE, once it may end

The end of the pipe is the end of the process behind it. Heartbeats go to the job's store (`feed`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from typing_extensions import override

from phalanx.launch.feed import Feed
from phalanx.launch.heartbeat import BEAT_S, PULSE

HELPERS_S: Final = 1.0
"""Time between SIGTERM and SIGKILL for the processes that a rank has started, in seconds."""

LEAVE = "leave"
"""Message from the parent that the rank may end; a number instead is the signal that stops it."""

MOST_BYTES: Final = 1 << 20
"""Most bytes to read at once; the system call reserves as much memory."""

_SIZES: Final = {4: struct.Struct("!i"), 8: struct.Struct("!Q")}
"""Formats of a message's size by their length, in bytes; the first has -1 if the second follows."""


class ByValue:
    """A wrapper that unpickles to `value` itself, with a separate copy of each tensor.

    torch makes multiprocessing send each tensor as a file descriptor of shared memory. A new
    process accepts at most 250 descriptors, and a host limits a process to a few thousand.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        written = BytesIO()
        _PlainPickler(written).dump(self._value)
        return pickle.loads, (written.getvalue(),)


class _PlainPickler(ForkingPickler):
    """Pickler with the reducers of multiprocessing, such as for locks, but without torch's."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        known: Any = self.dispatch_table
        self.dispatch_table = {
            of: known[of] for of in known if not known[of].__module__.startswith("torch.")
        }

    @override
    def reducer_override(self, obj: Any, /) -> Any:
        """Send only the elements of a view, not its whole storage."""
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.layout != torch.strided:
            return NotImplemented
        if obj.untyped_storage().nbytes() <= obj.nbytes:
            return NotImplemented
        elements = obj.detach().clone().requires_grad_(obj.requires_grad)
        return elements.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class ParentPipe:
    """This rank's end of the pipe to its parent process, which decides when the rank may end."""

    def __init__(self, connection: Connection, sockets: str) -> None:
        """`sockets` is the parent's folder of sockets, which the rank removes after a kill."""
        self._connection = connection
        self._sockets = sockets
        self._process = os.getpid()
        self._feed: Feed | None = None
        self._may_leave = threading.Event()
        self._may_leave.set()  # at once if no thread receives messages

    def open(self) -> None:
        """Start the thread that receives messages of the parent, and sends heartbeats to a feed."""
        threading.Thread(target=self._serve, name="pulse", daemon=True).start()
        self._may_leave.clear()

    def beat_on(self, feed: Feed) -> None:
        """Send heartbeats from now on, and one at once when the pulse changes."""
        self._feed = feed
        PULSE.on_change = self._beat
        self._beat()

    def wait_to_leave(self) -> None:
        """Wait until the parent sends LEAVE; return at once if no thread receives messages."""
        self._may_leave.wait()

    @property
    def is_of_fork(self) -> bool:
        """Whether a script forked this process, which is then no rank of the job."""
        return os.getpid() != self._process

    def send(self, kind: str, value: Any) -> None:
        """Send the result or failure; raise OSError if the parent has closed the pipe."""
        if not self.is_of_fork:
            self._connection.send((kind, value))

    def _beat(self) -> None:
        if self._feed is not None:
            with suppress(RuntimeError):  # the store has ended with the parent, as the pipe will
                self._feed.send(PULSE.beat())

    def _serve(self) -> None:
        """Send a heartbeat every BEAT_S and obey the parent; end at once if the parent ends."""
        try:
            while True:
                if self._connection.poll(BEAT_S):
                    word = self._connection.recv()
                    if word == LEAVE:
                        self._may_leave.set()
                        return
                    PULSE.stop_signal = word
                self._beat()
        except (EOFError, OSError):
            end_children()
            parent = multiprocessing.parent_process()
            if self._sockets and parent is not None and not parent.is_alive():
                shutil.rmtree(self._sockets, ignore_errors=True)
            os._exit(1)


class RankPipe:
    """The parent's end of the pipe to a rank, read as the bytes arrive.

    `Connection.recv` waits for the rest of a message that has begun. The rest may never come: the
    rank was stopped or killed while it sent, and a process that the rank forked may hold the pipe
    open.
    """

    def __init__(self, connection: Any) -> None:
        """Read the messages of a `Connection` (its class depends on the platform)."""
        self._send = connection.send
        self.fileno, self.close = connection.fileno, connection.close
        # The format of Connection is private; tests/launch/test_pipe.py pins it.
        self._is_size, self._num_bytes = True, 4
        self._bytes = bytearray()

    def send(self, word: Any) -> None:
        """Send to the rank, unless it has ended, which `receive` detects."""
        with suppress(OSError):
            self._send(word)

    def receive(self) -> tuple[str, Any] | None:
        """Read once from a pipe that is ready; return the message if it is now complete.

        Raises:
            EOFError: the rank has closed the pipe, perhaps within a message.
            ConnectionResetError: the rank has ended before it read all that was sent to it.
        """
        read = os.read(self.fileno(), min(MOST_BYTES, self._num_bytes - len(self._bytes)))
        if not read:
            raise EOFError
        self._bytes += read
        if len(self._bytes) < self._num_bytes:
            return None
        # size < 2^31    4 bytes, then the message
        # larger         4 bytes with -1, 8 bytes, then the message
        complete, self._bytes = self._bytes, bytearray()
        if self._is_size:
            (size,) = _SIZES[len(complete)].unpack(complete)
            self._is_size, self._num_bytes = size == -1, 8 if size == -1 else size
            return None
        self._is_size, self._num_bytes = True, 4
        return pickle.loads(complete)


def end_children() -> None:
    """End this process's child processes, such as DataLoader workers, as Python does at exit."""
    helpers = multiprocessing.active_children()
    for helper in helpers:
        helper.terminate()
    until_s = time.monotonic() + HELPERS_S
    for helper in helpers:
        helper.join(max(0.0, until_s - time.monotonic()))
    for helper in helpers:
        if helper.is_alive():
            helper.kill()
