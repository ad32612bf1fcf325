"""Messages, bytes that are none, and addresses of roles."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import socket
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.server import wire
from phalanx.server.message import (
    FRAME_BYTES,
    NAMES,
    WireError,
    WireMessage,
    decode,
    encode,
    in_frames,
    num_frames,
)
from phalanx.server.secret import Secret
from phalanx.server.shared import SharedTensors, copy_concatenated
from phalanx.server.wire import Connection, Listener, check_address


@pytest.mark.parametrize("dtype", NAMES)
def test_tensors_come_as_they_went(dtype: torch.dtype) -> None:
    sent = [torch.arange(5).to(dtype), torch.empty(0, dtype=dtype)]
    frames = [bytearray(frame) for frame in encode(WireMessage("push", {"clock": 3}, sent))]
    found = decode(frames)
    assert found.kind == "push" and found["clock"] == 3
    for ours, theirs in zip(found.tensors, sent, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


@pytest.mark.parametrize("size", [0, 7, 8, 9, 16, 17])
def test_a_header_and_tensors_of_several_frames_are_joined(size: int) -> None:
    sent = [torch.arange(size, dtype=torch.float64), torch.ones(3), torch.arange(size).double()]
    frames = encode(WireMessage("push", {"long": "a" * 40}, sent), 64)
    assert len(frames) == 3 + 1 + 2 * -(-size // 8)
    assert all(len(frame) <= 64 for frame in frames)
    found = decode([bytearray(frame) for frame in frames]).tensors
    assert all(torch.equal(*pair) for pair in zip(found, sent, strict=True))
    for wrong in (frames[:-1], [*frames, b""], [*frames, b"12"], [*frames[:-1], b"12"]):
        with pytest.raises(WireError):
            decode([bytearray(frame) for frame in wrong])


def test_a_tensor_is_sent_from_where_it_lies() -> None:
    tensor = torch.arange(4.0)
    frame = encode(WireMessage("push", {}, [tensor]))[1]
    tensor[0] = 9.0
    assert torch.frombuffer(bytearray(frame), dtype=torch.float32)[0] == 9.0


@pytest.mark.parametrize(
    "size", [0, 1, FRAME_BYTES // 8 - 1, FRAME_BYTES // 8, FRAME_BYTES // 4 + 1]
)
def test_a_flat_tensor_is_cut_into_frames_and_dealt_out_again(size: int) -> None:
    flat = torch.arange(size, dtype=torch.float64)
    frames = in_frames(flat)
    assert len(frames) == num_frames(size, flat.dtype)
    assert all(frame.nbytes <= FRAME_BYTES for frame in frames)
    found = torch.zeros_like(flat)
    for parts in ([found], list(found.split(1 << 16)), [found[: size // 3], found[size // 3 :]]):
        found.zero_()
        copy_concatenated(frames, parts)
        assert torch.equal(found, flat)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=200)
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@pytest.mark.parametrize(
    "header",
    [
        [1, 2],
        {"kind": "push"},
        {"kind": 3, "fields": {}, "tensors": []},
        {"kind": "push", "fields": {}, "tensors": [["float32", 3]]},
        {"kind": "push", "fields": {}, "tensors": [["complex64", 1]]},
        {"kind": "push", "fields": {}, "tensors": [["float32", math.inf]]},
        {"kind": "push", "fields": {}, "tensors": [["float32", math.nan]]},
        {"kind": "push", "fields": {}, "tensors": [["float32", -1]]},
        {"kind": "\ud800", "fields": {}, "tensors": []},
        {"kind": "hello", "fields": {"number": "\ud800"}, "tensors": []},
        {"kind": "hello", "fields": {"\ud800": [{"deep": "\udfff"}]}, "tensors": []},
    ],
)
def test_a_header_that_is_none_is_refused(header: object) -> None:
    with pytest.raises(WireError):
        decode([json.dumps(header).encode() + b"\n"])


@pytest.mark.parametrize("size", ["0.0", "true", '"0"', "null"])
def test_a_size_that_is_no_whole_number_is_refused(size: str) -> None:
    header = b'{"kind": "push", "fields": {}, "tensors": [["float32", %s]]}\n' % size.encode()
    with pytest.raises(WireError, match="not a whole number"):
        decode([header, b""])


def test_text_beyond_ascii_comes_as_it_went() -> None:
    fields = {"name": "käse \U0001f9c0 \\ud800", "loss": math.inf}
    (frame,) = encode(WireMessage("beat", fields))
    assert decode([frame]).fields == fields


def messages(rng: random.Random) -> Generator[list[bytes]]:
    """Yield random messages, and real ones with bytes, values or frames replaced."""
    odd = [
        math.inf,
        math.nan,
        -1,
        10**400,
        True,
        None,
        "\ud800",
        "\udfff\0",
        [],
        {},
        [[]],
        "x" * 99,
    ]
    kinds = ["hello", "proof", "push", "beat", "who", "challenge", "\ud800"]
    for _ in range(2000):
        named = {
            name: rng.choice([rng.choice(odd), "0" * 32, 7]) for name in ("number", "proof", "q")
        }
        sizes = [[rng.choice(["float32", "int64", None]), rng.choice([0, 2, *odd])]]
        header = {"kind": rng.choice(kinds), "fields": named, "tensors": sizes * rng.randrange(2)}
        if rng.random() < 0.3:
            header[rng.choice([*header])] = rng.choice(odd)
        text = bytearray(json.dumps(header).encode() + b"\n")
        for _ in range(rng.choice([0, 0, 1, 4])):
            text[rng.randrange(len(text))] = rng.randrange(256)
        frames = [bytes(text)] + [rng.randbytes(rng.choice([0, 8]))] * rng.choice([0, 0, 0, 1, 2])
        yield rng.choice([frames, frames, frames, frames[1:], [rng.randbytes(20)]])


def test_a_message_is_read_or_refused_and_nothing_else() -> None:
    num_read = 0
    for frames in messages(random.Random(0)):
        try:
            found = decode(frames)
        except WireError:
            continue
        assert found.kind.encode() is not None
        num_read += 1
    assert 100 < num_read < 1900


def test_a_truncated_tensor_is_refused() -> None:
    frames = [bytes(frame) for frame in encode(WireMessage("push", {}, [torch.ones(4)]))]
    with pytest.raises(WireError, match="15 bytes; expected 16"):
        decode([frames[0], frames[1][:-1]])


class Ends:
    """A listener, and what speaks to it."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.secret, self.lines = Secret.new(), list[str]()
        own = (self.context, self.secret, address, self.lines.append)
        self.listener = Listener(*own)
        self.links: list[Connection] = []

    def link(self, secret: Secret | None = None) -> Connection:
        own = (self.context, secret or self.secret, self.listener.address, self.lines.append)
        made = Connection(*own)
        self.links.append(made)
        return made

    def hear(self, num: int, seconds: float = 20.0) -> list[WireMessage]:
        """Let both ends speak until the messages have come."""
        return [message for _, message in self.hear_all(num, seconds)]

    def hear_all(self, num: int, seconds: float = 20.0) -> list[tuple[bytes, WireMessage]]:
        """Return messages with their senders, see `hear`."""
        found: list[tuple[bytes, WireMessage]] = []
        until_s = time.monotonic() + seconds
        while len(found) < num and time.monotonic() < until_s:
            self.listener.socket.poll(5)
            found += self.listener.receive()
            for link in self.links:
                link.receive()
        return found

    def close(self) -> None:
        self.listener.close()
        for link in self.links:
            link.close()
        self.context.destroy(linger=0)


def unencrypted(routing_id: bytes, frame: bytes) -> bytes:
    """Return the bytes of a connection of ZMTP 3.0 without encryption that sends one frame."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", routing_id)):
        ready += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return greeting + bytes([4, len(ready)]) + ready + bytes([0, len(frame)]) + frame


def test_no_peer_without_the_secret_is_heard_whoever_it_says_it_is() -> None:
    """Not on loopback either, and not by the routing id of a peer that has gone."""
    ends = Ends("tcp://127.0.0.1:*")
    raw: zmq.Socket[bytes] | None = None
    try:
        known = ends.link()
        known.send(WireMessage("push", {"q": 1}, [torch.ones(700_000)]))
        ((peer, heard),) = ends.hear_all(1)
        assert torch.equal(heard.tensors[0], torch.ones(700_000))
        known.close()
        ends.links.remove(known)
        end = WireMessage("end", {"q": 3})
        raw = ends.context.socket(zmq.DEALER)
        raw.curve_publickey, raw.curve_secretkey = ends.secret.curve("link")
        raw.curve_serverkey = Secret.new().curve("listener")[0]
        raw.connect(ends.listener.address)
        raw.send_multipart(encode(end))
        host, port = ends.listener.address.removeprefix("tcp://").split(":")
        for sent in (b"GET / HTTP/1.1\r\n\r\n" * 300, unencrypted(peer, *encode(end))):
            with socket.create_connection((host, int(port))) as plain:
                plain.sendall(sent)
                with suppress(ConnectionResetError):
                    while plain.recv(4096):  # ZeroMQ closes the connection
                        pass
        known = ends.link()
        known.send(WireMessage("pull", {"q": 4}))
        assert [message.kind for message in ends.hear(1)] == ["pull"]
        assert {*ends.lines} == {f"connected to {ends.listener.address}"}
        assert not ends.hear(1, 0.5)
    finally:
        if raw is not None:
            raw.close(linger=0)
        ends.close()


def test_messages_to_a_listener_that_is_gone_do_not_pile_up_for_the_next(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    ends = Ends(address)
    try:
        link = ends.link()
        link.send(WireMessage("beat", {"q": 0}))
        assert len(ends.hear(1)) == 1
        ends.listener.close()
        for number in range(100):
            link.send(WireMessage("beat", {"q": number}))
            time.sleep(0.005)
        ends.listener = Listener(ends.context, ends.secret, address, ends.lines.append)
        until_s = time.monotonic() + 20
        while not (found := ends.hear(1, 0.05)) and time.monotonic() < until_s:
            link.send(WireMessage("beat", {"q": "after"}))
        assert [message["q"] for message in found][-1:] == ["after"]
        assert len(found) < 50
    finally:
        ends.close()


def test_a_message_that_is_none_ends_neither_end(tmp_path: Path) -> None:
    ends = Ends(f"ipc://{tmp_path}/socket")
    raw = ends.context.socket(zmq.DEALER)
    try:
        known = ends.link()
        known.send(WireMessage("hello"))
        ((peer, _),) = ends.hear_all(1)
        raw.connect(ends.listener.address)
        for number, frames in enumerate(messages(random.Random(2))):
            ends.listener.socket.send_multipart([peer, *frames])
            raw.send_multipart(frames or [b""])
            if number % 100 == 0:
                known.send(WireMessage("last", {"q": number}))
                while not [m for m in ends.hear(1) if m.kind == "last"]:
                    pass
        assert len(ends.lines) > 1000 and all(line.encode() for line in ends.lines)
    finally:
        raw.close(linger=0)
        ends.close()


def test_a_frame_above_the_limit_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(wire, "FRAME_BYTES", 1 << 16)
        ends = Ends(f"ipc://{tmp_path}/socket")
    try:
        ends.link().send(WireMessage("push", {"q": 1}, [torch.ones(1 << 15)]))
        assert ends.hear(1, 1.0) == []
        other = ends.link()
        other.send(WireMessage("pull", {"q": 2}))
        assert [m.kind for m in ends.hear(1)] == ["pull"]
    finally:
        ends.close()


def test_a_stranger_takes_no_more_than_a_short_frame() -> None:
    ends = Ends("tcp://127.0.0.1:*")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
    try:
        host, port = ends.listener.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as plain:
            plain.sendall(greeting + b"\x06" + (1 << 17).to_bytes(8, "big") + bytes(1 << 16))
            with suppress(ConnectionResetError):
                while plain.recv(4096):  # ZeroMQ closes the connection at the length of the frame
                    pass
    finally:
        ends.close()


def test_a_role_opens_descriptors_of_its_own_when_strangers_have_all() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends, taken = Ends("tcp://127.0.0.1:*"), list[int]()
    try:
        ends.link().send(WireMessage("push"))
        assert len(ends.hear(1)) == 1
        most = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 50, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        late = ends.link()
        shared = SharedTensors([4], torch.float32)
        os.close(taken.pop())  # a stranger leaves: ZeroMQ tries to connect until one does
        os.close(taken.pop())
        late.send(WireMessage("pull"))
        assert [each.kind for each in ends.hear(1)] == ["pull"]
        shared.close()
    finally:
        for each in taken:
            os.close(each)
        ends.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7000", "tcp://[fe80::1]:7000", "tcp://a:*"])
def test_an_address_of_a_host_is_accepted(address: str) -> None:
    check_address("address", address)


def test_an_address_that_is_not_encrypted_is_refused() -> None:
    with pytest.raises(ConfigError, match="address is ipc:///tmp/a; expected tcp://HOST:PORT"):
        check_address("address", "ipc:///tmp/a")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_an_address_of_any_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"such as tcp://10\.0\.0\.1:70, or tcp://127"):
        check_address("address", f"tcp://{host}:70")


@pytest.mark.parametrize("port", ["65536", "99999", "9" * 5000])
def test_a_port_that_no_host_has_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=r"the largest port is 65535; . selects any free port"):
        check_address("address", f"tcp://127.0.0.1:{port}")
