"""Reading the messages of a rank: whole, in parts, and one whose end does not come."""

import os
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import pytest

from phalanx.launch.pipe import RankPipe

SIZES = [1, 10_000, 20_000]
"""Of messages: Connection sends a size and its message in one write, or in two."""


def received(pipe: Any) -> list[tuple[str, Any]]:
    """Return the messages that have arrived whole."""
    found: list[tuple[str, Any]] = []
    while wait([pipe], 0):
        if message := pipe.receive():
            found.append(message)
    return found


def test_messages_are_received_in_their_order() -> None:
    ours, theirs = Pipe()
    pipe = RankPipe(ours)
    for size in SIZES:
        theirs.send(("result", b"x" * size))
    assert [len(value) for _, value in received(pipe)] == SIZES
    pipe.send("leave")
    assert theirs.recv() == "leave"


def test_a_message_is_received_once_its_last_byte_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the size of one above 2 GiB, which takes more bytes."""
    sent = bytearray()
    message: tuple[str, Any] = ("result", b"x" * 20_000)
    _, theirs = Pipe()
    monkeypatch.setattr(theirs, "_send", sent.extend)
    theirs.send(message)
    body = bytes(sent[4:])
    ours, theirs = Pipe()
    pipe = RankPipe(ours)
    for size in (sent[:4], b"\xff" * 4 + len(body).to_bytes(8, "big")):
        for part in (size[:3], size[3:], body[:1], body[1:-1]):
            os.write(theirs.fileno(), part)
            assert received(pipe) == []
        os.write(theirs.fileno(), body[-1:])
        assert received(pipe) == [message]


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 10])
def test_the_end_of_a_pipe_ends_what_was_begun(num_bytes: int) -> None:
    ours, theirs = Pipe()
    pipe = RankPipe(ours)
    os.write(theirs.fileno(), b"\0\0\1\0 a message"[:num_bytes])
    assert received(pipe) == []
    theirs.close()
    with pytest.raises(EOFError):
        pipe.receive()
