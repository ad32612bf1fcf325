"""Messages over ZeroMQ, between processes that have the job's secret.

CURVE encrypts and authenticates every TCP connection, also on loopback, with keys derived from the
secret. No handshake contains the listener's public key, so a peer without the secret cannot begin
one: ZeroMQ closes its connection before it reads a message. Sockets in a job's folder (ipc), which
only its owner can enter, need no keys.

[Note: No monitor] ZeroMQ can report refused connections to a monitor socket. A listener has none:
a stranger would fill the log, and ZeroMQ stops all connections while a monitor's queue is full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import zmq

from phalanx.server.descriptors import own_descriptors
from phalanx.server.message import FRAME_BYTES, WireError, WireMessage, decode, encode
from phalanx.server.secret import Secret

MOST_WAITING: Final = 1000
"""Most messages queued at each end of a connection; ZeroMQ then accepts no more."""

CURVE_BYTES: Final = 64
"""Most bytes that CURVE adds to a frame."""

TCP_FRAME_BYTES: Final = 1 << 15
"""Most bytes of a frame over TCP, where strangers can begin one, see descriptors.py."""

KEYLESS: Final = ("ipc://", "inproc://")
"""Beginnings of addresses that other users cannot reach, because their folder is private."""

Log = Callable[[str], None]


def _new_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str
) -> tuple[zmq.Socket[bytes], int]:
    """Return a new socket for an address, and the most bytes of its frames."""
    with own_descriptors():
        socket = context.socket(kind)
    frame_bytes = FRAME_BYTES if address.startswith(KEYLESS) else TCP_FRAME_BYTES
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
    socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
    # A stranger's handshake is held to it, too, so it bounds the memory of each connection.
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes + CURVE_BYTES)
    return socket, frame_bytes


def send_frames(socket: zmq.Socket[bytes], frames: list[Any]) -> bool:
    """Send a message; return False if its queue is full, or if nobody receives it."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:  # requests are retried
        return False
    return True


class Listener:
    """The end of connections that peers connect to, such as a server's.

    Attributes:
        address: address at which it listens.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: Secret,
        address: str,
        log: Log,
    ) -> None:
        """Listen at an address.

        Raises:
            zmq.ZMQError: this host cannot listen at the address.
        """
        self._log = log
        self.socket, self._frame_bytes = _new_socket(context, zmq.ROUTER, address)
        if not address.startswith(KEYLESS):
            self.socket.curve_publickey, self.socket.curve_secretkey = secret.curve("listener")
            self.socket.curve_server = True
        self.socket.bind(address)
        self.address = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")  # pyright: ignore[reportArgumentType]

    def receive(self) -> list[tuple[bytes, WireMessage]]:
        """Return the messages that have arrived, each with its sender, without waiting."""
        found: list[tuple[bytes, WireMessage]] = []
        while True:
            try:
                received = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return found
            peer = received.pop(0).bytes
            try:
                found.append((peer, decode(received)))
            except WireError as error:
                self._log(f"refused: {error}")

    def send(self, peer: bytes, message: WireMessage) -> None:
        """Send a message to a peer; drop the message if the peer has disconnected."""
        if not send_frames(self.socket, [peer, *encode(message, self._frame_bytes)]):
            self._log(f"dropped a message '{message.kind}': the peer's queue is full")

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


class Connection:
    """The end of a connection that connects to a listener.

    Attributes:
        is_open: whether a message has been sent, which needs a listener with the same secret.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: Secret,
        address: str,
        log: Log,
    ) -> None:
        self._log = log
        self.address = address
        self.socket, self._frame_bytes = _new_socket(context, zmq.DEALER, address)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # else heartbeats queue up while disconnected
        if not address.startswith(KEYLESS):
            self.socket.curve_publickey, self.socket.curve_secretkey = secret.curve("link")
            self.socket.curve_serverkey = secret.curve("listener")[0]
        self.socket.connect(address)
        self._waiting: dict[Any, WireMessage] = {}
        self.is_open = False

    def send(self, message: WireMessage) -> None:
        """Send a message, or queue it until `is_open`; the queue has each request once.

        A message to a listener that has gone is dropped: requests are retried.
        """
        if self._send_waiting():
            self._send(message)
        else:
            self._waiting[message.kind, message.fields.get("q")] = message
            self._send_waiting()

    def receive(self) -> list[WireMessage]:
        """Return the messages that have arrived, without waiting."""
        self._send_waiting()
        found: list[WireMessage] = []
        while True:
            try:
                received = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return found
            try:
                found.append(decode(received))
            except WireError as error:
                self._log(f"refused: {error}")

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _send_waiting(self) -> bool:
        """Send the queue if the listener accepts it; return `is_open`."""
        for key, message in () if self.is_open else list(self._waiting.items()):
            if not self._send(message):
                break
            self.is_open = True
            del self._waiting[key]
        return self.is_open

    def _send(self, message: WireMessage) -> bool:
        """Send; return False if no listener accepts the message."""
        return send_frames(self.socket, encode(message, self._frame_bytes))
