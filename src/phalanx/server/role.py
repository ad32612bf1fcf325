"""What coordinator, servers and scheduler have in common: a loop over messages."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import zmq
from typing_extensions import override

from phalanx.server.beats import BEAT_S
from phalanx.server.loop_clock import TICK_S, LoopClock
from phalanx.server.message import WireError, WireMessage
from phalanx.server.secret import Secret
from phalanx.server.wire import Connection, Faults, Listener, Log

SILENT_S: Final = 10.0
"""Seconds without an answer of the coordinator after which a member says so, each time."""

MISTAKES: Final = (WireError, KeyError, TypeError, ValueError, IndexError, OverflowError)
"""What a message raises that says what it should not."""

Settings = dict[str, Any]


def no_answer(address: str) -> str:
    """Say that the coordinator is silent, and why that may be."""
    return (
        f"the coordinator at {address} does not answer; it may not run, have another secret, or "
        "listen at an address of another kind: 127.0.0.1 is not encrypted, anything else is"
    )


class Role:
    """A process that answers messages, one after the other, until the job has ended.

    Attributes:
        name: in the job.
        is_over: whether it is to end.
        refusal: why it ends before the job, such as that the coordinator does not take it.
        clock: the time for which it has listened.
    """

    def __init__(
        self,
        name: str,
        secret: Secret,
        address: str,
        log: Log,
        faults: Faults | None = None,
    ) -> None:
        self.name = name
        self.secret, self.log, self.faults = secret, log, faults
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.listener = Listener(self.context, secret, address, log, faults)
        except zmq.ZMQError:  # nobody can listen there
            self.context.destroy(linger=0)
            raise
        self.is_over, self.refusal = False, ""
        self.clock = LoopClock()
        self._begun_s = time.monotonic()  # when the loop began with what it is at
        self._poller = zmq.Poller()
        self._poller.register(self.listener.socket, zmq.POLLIN)
        self._links: list[Connection] = []

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.listener.address

    def link(self, address: str) -> Connection:
        """Return a connection to another role, by whose messages the loop wakes."""
        own = (self.context, self.secret, address, self.log, self.faults)
        link = Connection(*own)
        self._poller.register(link.socket, zmq.POLLIN)
        self._links.append(link)
        return link

    def unlink(self, link: Connection) -> None:
        """Close such a connection."""
        self._poller.unregister(link.socket)
        self._links.remove(link)
        link.close()

    def reply(
        self, peer: bytes, request: WireMessage, kind: str, tensors: Any = (), **more: Any
    ) -> None:
        """Answer a request, whose number goes with it."""
        fields = {"q": request.fields.get("q"), **more}
        self.listener.send(peer, WireMessage(kind, fields, tensors))

    def run(self, stop: threading.Event | None = None) -> None:
        """Answer until the job has ended, or `stop` is set."""
        try:
            while not self.is_over and not (stop is not None and stop.is_set()):
                self.turn()
        finally:
            self.close()

    def turn(self) -> None:
        """Wait a tick for messages, answer all that there are, and do work that is due."""
        self._poller.poll(round(TICK_S * 1000))
        for peer, message in self.listener.receive():
            self._begun_s = time.monotonic()
            try:
                self.handle(peer, message)
            except MISTAKES as error:
                self.log(f"refused: '{message.kind}': {type(error).__name__}: {error}")
                self.reply(peer, message, "refused", why=str(error))
        heard = [(link, each) for link in self._links for each in link.receive()]
        for link, message in heard:
            self._begun_s = time.monotonic()
            try:
                self.hear(link, message)
            except MISTAKES as error:
                self.log(f"ignored: '{message.kind}': {type(error).__name__}: {error}")
        self._begun_s = time.monotonic()
        if self._begun_s - self.clock.looked_s > TICK_S:
            self.tick()

    def handle(self, peer: bytes, message: WireMessage) -> None:
        """Do what a message asks for."""
        raise NotImplementedError

    def hear(self, link: Connection, message: WireMessage) -> None:
        """Take a message of a connection of its own."""

    def tick(self) -> None:
        """Do work that is due by the clock."""
        self.clock.look()

    def close(self) -> None:
        """Let go of everything."""
        self.listener.close()
        self.context.destroy(linger=200)


class Member(Role):
    """A role that the coordinator knows.

    Attributes:
        map: what the coordinator said last.
    """

    kind = "member"

    def __init__(self, coordinator: str, incarnation: str, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.incarnation = incarnation
        self.map: Settings = {"epoch": 0, "term": 0}
        self._coordinator = self.link(coordinator)
        self._beat_s = 0.0
        self._silent_s = 0.0

    def facts(self) -> Settings:
        """Return what goes with a beat."""
        return {}

    @override
    def hear(self, link: Connection, message: WireMessage) -> None:
        if link is not self._coordinator:
            return
        if message.kind == "refused":
            self.refusal = f"the coordinator refuses {self.name}: {message.text('why')}"
            self.log(self.refusal)
            self.is_over = True
        elif message.kind == "map":
            self._silent_s = self.clock.now_s
            self._take(dict(message.fields))

    def _take(self, found: Settings) -> None:
        """Take a map that is not older than the one there is."""
        if (found["term"], found["epoch"]) < (self.map["term"], self.map["epoch"]):
            self.log(f"ignored a map of term {found['term']}, epoch {found['epoch']}")
            return
        is_new = found["epoch"] != self.map["epoch"]
        self.map = found
        self.is_over = self.is_over or bool(found.get("ended"))
        if is_new:
            self.changed()

    def changed(self) -> None:
        """Do what follows from a new epoch."""

    @override
    def tick(self) -> None:
        """Say now and then that this one is there, with its facts."""
        super().tick()
        if time.monotonic() - self._beat_s > BEAT_S:
            self._beat_s = time.monotonic()
            if self.clock.now_s - self._silent_s > SILENT_S:
                self._silent_s = self.clock.now_s
                self.log(no_answer(self._coordinator.address))
            fields = {"name": self.name, "role": self.kind, "address": self.address}
            fields |= {name: self.map[name] for name in ("term", "epoch")}
            more = {"incarnation": self.incarnation, **self.facts()}
            self._coordinator.send(WireMessage("beat", {**fields, **more}))
