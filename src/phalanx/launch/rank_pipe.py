"""The parent's end of the pipe to a rank, read as the bytes arrive.

`Connection.recv` waits for the rest of a message that has begun. The rest may never come: the rank
was stopped or killed while it sent, and a process that the rank forked may hold the pipe open.
"""

from __future__ import annotations

import os
import pickle
import struct
from contextlib import suppress
from typing import Any, Final

_SIZES: Final = {4: struct.Struct("!i"), 8: struct.Struct("!Q")}
"""Formats of a message's size by their length, in bytes; the first has -1 if the second follows."""

MOST_BYTES: Final = 1 << 20
"""Most bytes to read at once; the system call reserves as much memory."""


class RankPipe:
    """The parent's end of the pipe to a rank; `rank.ParentPipe` is the other end."""

    def __init__(self, connection: Any) -> None:
        """Read the messages of a `Connection` (its class depends on the platform)."""
        self._send = connection.send
        self.fileno, self.close = connection.fileno, connection.close
        # The format of Connection is private; tests/launch/test_rank_pipe.py pins it.
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
        complete, self._bytes = self._bytes, bytearray()
        if self._is_size:
            (size,) = _SIZES[len(complete)].unpack(complete)
            self._is_size, self._num_bytes = size == -1, 8 if size == -1 else size
            return None
        self._is_size, self._num_bytes = True, 4
        return pickle.loads(complete)
