"""Messages over ZeroMQ: who may send one, and what happens to bytes of anyone else.

A listener takes messages only of peers that have shown by an HMAC over
numbers of both sides that they know the job's secret, and names every other in its log. Between
hosts the bytes are encrypted besides (CURVE), by keys that are made of the same secret.
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

from phalanx.server.address import is_local
from phalanx.server.message import WireError, WireMessage, decode, encode
from phalanx.server.secret import Secret

MOST_FRAME_BYTES: Final = 1 << 28
"""Bytes of a frame, at most."""

MOST_WAITING: Final = 1000
"""Messages that wait at either end of a connection before its sender has to wait."""

MOST_GREETINGS: Final = 1024
"""Peers that have not shown yet that they know the secret, at most; the oldest is forgotten."""

MOST_KNOWN: Final = 4096
"""Peers that have shown it, at most; whoever was silent for longest greets again."""

HELLO_S: Final = 0.5
"""Seconds after which an end that is not welcome yet greets again."""


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
    """Loses, doubles and reorders messages of a socket, for tests of what follows from it."""

    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._held: list[list[Any]] = []

    def of_socket(self) -> Faults:
        """Return faults of the same kinds for another socket."""
        return dataclasses.replace(self, seed=self._random.randrange(1 << 32))

    def passed(self, frames: list[Any]) -> list[list[Any]]:
        """Return what to send in place of one message, now."""
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
    """The end that waits for others, such as a server's.

    Attributes:
        address: where it listens.
        num_refused: messages that it has not taken.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: Secret,
        address: str,
        log: Log,
        faults: Faults | None = None,
    ) -> None:
        """Listen at an address; encrypted unless it is reached from this host alone."""
        self._secret, self._log = secret, log
        self._faults = None if faults is None else faults.of_socket()
        self.socket = context.socket(zmq.ROUTER)
        _set_up(self.socket)
        self._monitor = self.socket.get_monitor_socket(sum(_OPENED | _REFUSED) | _ENDED)
        if not is_local(address):
            public, own = secret.curve("listener")
            self.socket.curve_publickey, self.socket.curve_secretkey = public, own
            self.socket.curve_server = True
        else:  # any domain, also one that nobody asks for, keeps out who speaks no ZMTP 3
            self.socket.setsockopt(zmq.ZAP_DOMAIN, b"phalanx")
        self.socket.bind(address)
        self.address = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")  # pyright: ignore[reportArgumentType]
        self.num_refused = self._num_begun = 0
        self._known = OrderedDict[bytes, None]()
        self._greeting = OrderedDict[bytes, tuple[str, str]]()

    def receive(self) -> list[tuple[bytes, WireMessage]]:
        """Return what has come from peers that are known, each with its sender; never waits."""
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
        """Send to a peer, or nothing if it has gone."""
        frames = [peer, *encode(message)]
        for each in [frames] if self._faults is None else self._faults.passed(frames):
            try:
                self.socket.send_multipart(each, zmq.NOBLOCK, copy=False)
            except zmq.Again:  # it takes nothing; it asks again for what it misses
                self._log(f"a peer takes no message '{message.kind}'")

    def close(self) -> None:
        """Let go of the address."""
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    def _watch(self, event: int) -> None:
        """Follow connections: one that ends before its handshake is of a stranger."""
        if event in _OPENED:
            self._num_begun += 1 if event == zmq.EVENT_ACCEPTED else -1
        elif event in _REFUSED or self._num_begun > 0:
            self._num_begun = max(0, self._num_begun - 1)
            self._refuse(f"a connection that does not speak as it should (event {event})")

    def _refuse(self, why: str) -> None:
        self.num_refused += 1
        self._log(f"refused: {why}")

    def _greet(self, peer: bytes, message: WireMessage) -> None:
        """Take a step of a greeting; say to anyone else that they are not known."""
        reply = WireMessage("who")
        if message.kind == "hello":
            numbers = (message.text("number")[:64], secrets.token_hex(16))
            self._greeting[peer] = numbers
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
                self._refuse("a peer that does not know the job's secret")
        else:
            self._refuse(f"a message {message.kind[:40]!a} of a peer that is not known")
        self.send(peer, reply)


class Connection:
    """The end that speaks to a listener.

    Attributes:
        is_welcome: whether both ends have shown that they know the secret.
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
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # else beats pile up for a listener that is gone
        if not is_local(address):
            public, own = secret.curve("link")
            self.socket.curve_publickey, self.socket.curve_secretkey = public, own
            self.socket.curve_serverkey = secret.curve("listener")[0]
        self.socket.connect(address)
        self._waiting: dict[Any, WireMessage] = {}
        self.is_welcome = self._is_proven = False
        self._number = ""
        self._greeted_s = -math.inf
        self._greet()

    def send(self, message: WireMessage) -> None:
        """Send a message, or keep it until this end is welcome; one of the same number once."""
        if self.is_welcome:
            self._send(message)
        else:
            self._waiting[message.kind, message.fields.get("q")] = message
            self._greet()

    def receive(self) -> list[WireMessage]:
        """Return what has come; never waits.

        Messages of a listener that has not shown that it knows the secret are dropped.
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
        """Let go of the connection."""
        self.socket.close()

    def _send(self, message: WireMessage) -> bool:
        """Return whether somebody is there to take a message; who asked asks again."""
        frames = encode(message)
        for each in [frames] if self._faults is None else self._faults.passed(frames):
            try:
                self.socket.send_multipart(each, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
        return True

    def _greet(self) -> None:
        if time.monotonic() - self._greeted_s > HELLO_S:
            self._number, self._is_proven = secrets.token_hex(16), False
            if self._send(WireMessage("hello", {"number": self._number})):
                self._greeted_s = time.monotonic()

    def _answer(self, message: WireMessage) -> None:
        if message.kind == "who":  # a new process listens there, or a message was lost
            self.is_welcome = False
            self._greet()
        elif message.kind == "challenge":
            numbers = (self._number, message.text("number"))
            due = self._secret.proof("listener", *numbers)
            if not hmac.compare_digest(message.text("proof").encode(), due.encode()):
                return  # of an older greeting, or of somebody else: it is not answered
            self._is_proven = True
            self._send(WireMessage("proof", {"proof": self._secret.proof("link", *numbers)}))
        elif self._is_proven:
            self.is_welcome = True
            waiting, self._waiting = self._waiting, {}
            for each in waiting.values():
                self._send(each)
