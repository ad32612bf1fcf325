"""Authenticated messages over ZeroMQ.

A listener accepts messages only from peers that have proved by an HMAC over nonces of both sides
that they have the job's secret, and logs every other message or connection. Between hosts, messages
are also encrypted (CURVE), with keys derived from the same secret.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.errors import ConfigError
from phalanx.server.address import is_local
from phalanx.server.message import MOST_FRAME_BYTES, WireError, WireMessage, decode, encode
from phalanx.server.secret import Secret

MOST_WAITING: Final = 1000
"""Most messages queued at each end of a connection; ZeroMQ then accepts no more."""

MOST_GREETINGS: Final = 1024
"""Most unauthenticated peers whose nonces are stored; the oldest is dropped."""

MOST_KNOWN: Final = 4096
"""Most authenticated peers; the peer that was silent for longest must authenticate again."""

HELLO_S: Final = 0.5
"""Time between two greetings of a connection that is not authenticated, in seconds."""


_OPENED: Final = {int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_HANDSHAKE_SUCCEEDED)}
_REFUSED: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
}
_ENDED: Final = int(zmq.EVENT_DISCONNECTED)

Log = Callable[[str], None]


@dataclass
class Faults:
    """Faults that tests inject: messages of a socket are dropped, doubled and reordered at random.

    The rates `drop`, `double` and `reorder` are probabilities.
    """

    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._held: list[list[Any]] = []

    def of_socket(self) -> Faults:
        """Return faults with the same rates and a new seed, for another socket."""
        return dataclasses.replace(self, seed=self._random.randrange(1 << 32))

    def passed(self, frames: list[Any]) -> list[list[Any]]:
        """Return the messages to send now instead of the message `frames`."""
        chance = self._random.random()
        if chance < self.drop:
            return []
        held, self._held = self._held, []
        if chance < self.drop + self.reorder and not held:
            self._held = [frames]
            return []
        copies = 2 if self._random.random() < self.double else 1
        return [frames] * copies + held


def _set_up(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
    socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)


class Listener:
    """The end of connections that peers connect to, such as a server's.

    Attributes:
        address: address at which it listens.
        num_refused: number of refused messages and connections.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: Secret,
        address: str,
        log: Log,
        faults: Faults | None = None,
    ) -> None:
        """Listen at an address, with encryption unless only this host can reach it.

        Raises:
            ConfigError: the address names an interface that only this host can reach, such as lo.
            zmq.ZMQError: this host cannot listen at the address.
        """
        self._secret, self._log = secret, log
        self._faults = None if faults is None else faults.of_socket()
        self.socket = context.socket(zmq.ROUTER)
        _set_up(self.socket)
        self._monitor = self.socket.get_monitor_socket(sum(_OPENED | _REFUSED) | _ENDED)
        if not is_local(address):
            public, own = secret.curve("listener")
            self.socket.curve_publickey, self.socket.curve_secretkey = public, own
            self.socket.curve_server = True
        else:  # any ZAP domain, even an unused one, excludes peers older than ZMTP 3
            self.socket.setsockopt(zmq.ZAP_DOMAIN, b"phalanx")
        self.socket.bind(address)
        self.address = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")  # pyright: ignore[reportArgumentType]
        if is_local(self.address) != is_local(address):  # encryption was chosen by the other
            raise ConfigError(
                f"address is {address}, a name for {self.address}; expected {self.address}"
            )
        self.num_refused = self._num_begun = 0
        self._known = OrderedDict[bytes, None]()
        self._greeting = OrderedDict[bytes, tuple[str, str]]()

    def receive(self) -> list[tuple[bytes, WireMessage]]:
        """Return the messages that have arrived from authenticated peers, without waiting.

        Each comes with its sender. Messages of other peers are answered by the greeting.
        """
        found: list[tuple[bytes, WireMessage]] = []
        while self._monitor.poll(0):
            event: Any = recv_monitor_message(self._monitor)
            self._watch(int(event["event"]))
        while True:
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return found
            try:
                message = decode([frame.buffer for frame in frames])
                if peer.bytes in self._known and message.kind not in ("hello", "proof"):
                    self._known.move_to_end(peer.bytes)
                    found.append((peer.bytes, message))
                else:
                    self._greet(peer.bytes, message)
            except WireError as error:
                self._refuse(str(error))

    def send(self, peer: bytes, message: WireMessage) -> None:
        """Send a message to a peer; drop the message if the peer has disconnected."""
        frames = [peer, *encode(message)]
        for each in [frames] if self._faults is None else self._faults.passed(frames):
            try:
                self.socket.send_multipart(each, zmq.NOBLOCK, copy=False)
            except zmq.Again:  # its queue is full; the peer retries its requests
                self._log(f"dropped a message '{message.kind}': the peer's queue is full")

    def close(self) -> None:
        """Stop listening."""
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    def _watch(self, event: int) -> None:
        """Track connection events; a connection that ends before its handshake is refused."""
        if event in _OPENED:
            self._num_begun += 1 if event == zmq.EVENT_ACCEPTED else -1
        elif event in _REFUSED or self._num_begun > 0:
            self._num_begun = max(0, self._num_begun - 1)
            self._refuse(f"a connection that does not follow the protocol (event {event})")

    def _refuse(self, why: str) -> None:
        self.num_refused += 1
        self._log(f"refused: {why}")

    def _greet(self, peer: bytes, message: WireMessage) -> None:
        """Handle a step of a peer's greeting; answer "who" to any other message."""
        reply = WireMessage("who")
        if message.kind == "hello":
            number = message.text("number")[:64]
            numbers = self._greeting.get(peer)
            if numbers is None or numbers[0] != number:  # else it is due for the first challenge
                numbers = self._greeting[peer] = (number, secrets.token_hex(16))
            if len(self._greeting) > MOST_GREETINGS:
                self._greeting.popitem(last=False)
            proof = self._secret.proof("listener", *numbers)
            reply = WireMessage("challenge", {"number": numbers[1], "proof": proof})
        elif message.kind == "proof" and peer in self._known:  # its welcome was lost
            reply = WireMessage("welcome")
        elif message.kind == "proof" and peer in self._greeting:
            numbers = self._greeting.pop(peer)
            due = self._secret.proof("link", *numbers)
            if hmac.compare_digest(message.text("proof").encode(), due.encode()):
                self._known[peer] = None
                if len(self._known) > MOST_KNOWN:
                    self._known.popitem(last=False)
                reply = WireMessage("welcome")
            else:
                self._refuse("a peer that does not have the job's secret")
        else:
            self._refuse(
                f"a message {message.kind[:40]!a} from a peer without a proof of the secret"
            )
        self.send(peer, reply)


class Connection:
    """The end of a connection that connects to a listener.

    Attributes:
        is_welcome: whether both ends have proved that they have the secret.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: Secret,
        address: str,
        log: Log,
        faults: Faults | None = None,
    ) -> None:
        self._secret, self._log = secret, log
        self._faults = None if faults is None else faults.of_socket()
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        _set_up(self.socket)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # else heartbeats queue up while disconnected
        if not is_local(address):
            public, own = secret.curve("link")
            self.socket.curve_publickey, self.socket.curve_secretkey = public, own
            self.socket.curve_serverkey = secret.curve("listener")[0]
        self.socket.connect(address)
        self._waiting: dict[Any, WireMessage] = {}
        self.is_welcome = self._is_proven = False
        self._number = secrets.token_hex(16)
        self._greeted_s = -math.inf
        self._greet()

    def send(self, message: WireMessage) -> None:
        """Send a message, or queue it until `is_welcome`; the queue has each request once."""
        if self.is_welcome:
            self._send(message)
        else:
            self._waiting[message.kind, message.fields.get("q")] = message
            self._greet()

    def receive(self) -> list[WireMessage]:
        """Return the messages that have arrived, without waiting.

        Messages from a listener that has not proved that it has the secret are dropped.
        """
        found: list[WireMessage] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if not self.is_welcome:
                    self._greet()
                return found
            try:
                message = decode([frame.buffer for frame in frames])
                if message.kind in ("who", "challenge", "welcome"):
                    self._answer(message)
                elif self.is_welcome:
                    found.append(message)
            except WireError as error:
                self._log(f"refused: {error}")

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _send(self, message: WireMessage) -> bool:
        """Send; return False if no listener accepts the message, which requests then retry."""
        frames = encode(message)
        for each in [frames] if self._faults is None else self._faults.passed(frames):
            try:
                self.socket.send_multipart(each, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
        return True

    def _greet(self) -> None:
        """Send the nonce of this greeting, again if the listener has not answered for `HELLO_S`.

        Another nonce would make the answer of a slow listener, which is on its way, useless.
        """
        if time.monotonic() - self._greeted_s > HELLO_S:
            if self._send(WireMessage("hello", {"number": self._number})):
                self._greeted_s = time.monotonic()

    def _answer(self, message: WireMessage) -> None:
        if message.kind == "who":  # the listener was restarted, or a message was lost
            # A listener has proved itself by the nonce: another one needs a new nonce.
            if self._is_proven:
                self._number = secrets.token_hex(16)
            self.is_welcome = self._is_proven = False
            self._greet()
        elif message.kind == "challenge":
            numbers = (self._number, message.text("number"))
            due = self._secret.proof("listener", *numbers)
            if not hmac.compare_digest(message.text("proof").encode(), due.encode()):
                return  # the proof is from an older greeting, or from an impostor
            self._is_proven = True
            self._send(WireMessage("proof", {"proof": self._secret.proof("link", *numbers)}))
        elif self._is_proven:
            self.is_welcome = True
            waiting, self._waiting = self._waiting, {}
            for each in waiting.values():
                self._send(each)
