"""Messages over ZeroMQ, between processes that have the job's secret.

CURVE encrypts and authenticates every TCP connection, also on loopback, with keys derived from the
secret. No handshake contains the listener's public key, so a peer without the secret cannot begin
one: ZeroMQ closes its connection before it reads a message. Sockets in a job's folder (ipc), which
only its owner can enter, need no keys.

[Note: Strangers] ZeroMQ accepts a connection before its peer has shown the secret, and reads a
whole frame of its handshake. So a role has a low limit of descriptors, and short frames over TCP:
1,000 strangers take about 50 MB of it. For descriptors of its own the role raises the limit.

[Note: No monitor] ZeroMQ can report refused connections to a monitor socket. A listener has none:
a stranger would fill the log, and ZeroMQ stops all connections while a monitor's queue is full.
"""

from __future__ import annotations

import ipaddress
import resource
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import zmq

from phalanx.errors import ConfigError
from phalanx.server.message import FRAME_BYTES, WireError, WireMessage, decode, encode
from phalanx.server.secret import Secret

MOST_WAITING: Final = 1000
"""Most messages queued at each end of a connection; ZeroMQ then accepts no more."""

CURVE_BYTES: Final = 64
"""Most bytes that CURVE adds to a frame."""

TCP_FRAME_BYTES: Final = 1 << 15
"""Most bytes of a frame over TCP, see [Note: Strangers]."""

KEYLESS: Final = ("ipc://", "inproc://")
"""Beginnings of addresses that other users cannot reach, because their folder is private."""

Log = Callable[[str], None]


MOST_PORT: Final = 65_535
"""Largest port number."""


def check_address(option: str, address: str) -> None:
    """Check that others can connect to an address, which is sent to them unchanged.

    Raises:
        ConfigError: it is no TCP address, the only kind that is encrypted; its host is 0.0.0.0,
            [::] or *; or the port is too large.
    """
    if not address.startswith("tcp://"):
        raise ConfigError(f"{option} is {address}; expected tcp://HOST:PORT")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if port.isdecimal() and (len(port) > 5 or int(port) > MOST_PORT):
        raise ConfigError(
            f"{option} is {address}, but the largest port is {MOST_PORT}; * selects any free port"
        )
    is_any = host.startswith("*")
    with suppress(OSError, ValueError):  # neither an IP address nor a name that this host resolves
        number = host.strip("[]") if host.startswith("[") else host and socket.gethostbyname(host)
        is_any = is_any or ipaddress.ip_address(number).is_unspecified
    if is_any:
        raise ConfigError(
            f"{option} is {address}, which is any address of this host; expected the address that "
            f"others connect to, such as tcp://10.0.0.1:{port}, or tcp://127.0.0.1:{port} on one "
            "host"
        )


MOST_DESCRIPTORS: Final = 1024
"""Most descriptors of a role, its connections included, see [Note: Strangers]."""

_CHANGING = threading.Lock()


def limit_descriptors() -> None:
    """Limit the descriptors of this process to `MOST_DESCRIPTORS`, unless its limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, MOST_DESCRIPTORS), hard))


@contextmanager
def own_descriptors() -> Generator[None]:
    """Let this process open descriptors inside the block that strangers cannot take."""
    with _CHANGING:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(soft, min(2 * MOST_DESCRIPTORS, hard)), hard)
        )
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def send_frames(socket: zmq.Socket[bytes], frames: list[Any]) -> bool:
    """Send a message; return False if its queue is full, or if nobody receives it."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:  # requests are retried
        return False
    return True


class _End:
    """An end of connections: a socket whose frames are short enough for its address."""

    def __init__(
        self, kind: int, context: zmq.Context[zmq.Socket[bytes]], address: str, log: Log
    ) -> None:
        self.address, self._log = address, log
        with own_descriptors():
            self.socket = context.socket(kind)
        self._is_keyless = address.startswith(KEYLESS)
        self._frame_bytes = FRAME_BYTES if self._is_keyless else TCP_FRAME_BYTES
        # ZeroMQ's high-water marks count messages, MAXMSGSIZE the bytes of one frame: both bound
        # the memory that peers can take.
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        self.socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        # A stranger's handshake is held to it, too, so it bounds the memory of each connection.
        self.socket.setsockopt(zmq.MAXMSGSIZE, self._frame_bytes + CURVE_BYTES)

    def _received(self, num_ids: int) -> Iterator[tuple[list[Any], WireMessage]]:
        """Yield the first `num_ids` frames and the message of all that has arrived."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            ids, frames = frames[:num_ids], frames[num_ids:]
            try:
                yield ids, decode(frames)
            except WireError as error:
                self._log(f"refused: {error}")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class Listener(_End):
    """The end of connections that peers connect to, such as a server's.

    Attributes:
        address: address at which it listens.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], secret: Secret, address: str, log: Log
    ) -> None:
        """Listen at an address.

        Raises:
            zmq.ZMQError: this host cannot listen at the address.
        """
        super().__init__(zmq.ROUTER, context, address, log)
        if not self._is_keyless:
            self.socket.curve_publickey, self.socket.curve_secretkey = secret.curve("listener")
            self.socket.curve_server = True
        self.socket.bind(address)
        self.address = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")  # pyright: ignore[reportArgumentType]

    def receive(self) -> list[tuple[bytes, WireMessage]]:
        """Return the messages that have arrived, each with its sender, without waiting."""
        return [(peer.bytes, message) for (peer,), message in self._received(1)]

    def send(self, peer: bytes, message: WireMessage) -> None:
        """Send a message to a peer; drop the message if the peer has disconnected."""
        if not send_frames(self.socket, [peer, *encode(message, self._frame_bytes)]):
            self._log(f"dropped a message '{message.kind}': the peer's queue is full")


class Connection(_End):
    """The end of a connection that connects to a listener.

    Attributes:
        is_open: whether a message has been sent, which needs a listener with the same secret.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], secret: Secret, address: str, log: Log
    ) -> None:
        super().__init__(zmq.DEALER, context, address, log)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # else heartbeats queue up while disconnected
        if not self._is_keyless:
            self.socket.curve_publickey, self.socket.curve_secretkey = secret.curve("link")
            self.socket.curve_serverkey = secret.curve("listener")[0]
        self.socket.connect(address)
        self._waiting: dict[Any, WireMessage] = {}
        self.is_open = False

    def send(self, message: WireMessage) -> None:
        """Send a message, or queue it until `is_open`; the queue has each request once.

        A message to a listener that has gone is dropped: requests are retried.
        """
        if not self.is_open:
            self._waiting[message.kind, message.fields.get("q")] = message
            self._send_waiting()
        else:
            send_frames(self.socket, encode(message, self._frame_bytes))

    def receive(self) -> list[WireMessage]:
        """Return the messages that have arrived, without waiting."""
        self._send_waiting()
        return [message for _, message in self._received(0)]

    def _send_waiting(self) -> None:
        """Send the queue if the listener accepts it."""
        for key, message in list(self._waiting.items()):
            if not send_frames(self.socket, encode(message, self._frame_bytes)):
                break
            if not self.is_open:
                self.is_open = True
                self._log(f"connected to {self.address}")
            del self._waiting[key]
