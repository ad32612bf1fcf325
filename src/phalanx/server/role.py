"""Base classes of coordinator, servers and scheduler: a message loop."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import zmq
from typing_extensions import override

from phalanx.server.heartbeats import BEAT_S
from phalanx.server.loop_clock import TICK_S, LoopClock
from phalanx.server.message import WireError, WireMessage
from phalanx.server.secret import Secret
from phalanx.server.wire import Connection, Listener, Log

SILENT_S: Final = 10.0
"""Silence of the coordinator before it is reported, and between two reports, in seconds."""

MEET_S: Final = 600.0
"""Time after which a role exits that has never heard of its coordinator, in seconds."""

MISTAKES: Final = (WireError, KeyError, TypeError, ValueError, IndexError, OverflowError)
"""Exceptions that handling a malformed message may raise."""

Settings = dict[str, Any]


def no_answer(address: str) -> str:
    """Return a message that the coordinator is silent, with possible reasons."""
    return (
        f"the coordinator at {address} does not answer: it may not be running, its job may have "
        "ended, or it may have a different secret"
    )


class Role:
    """A process that handles messages one after another until the job has ended.

    Attributes:
        name: name of the role in the job.
        is_over: whether the loop must exit.
        refusal: reason why the role exits before the job ends, such as a refusal by the
            coordinator; empty if there is none.
        clock: time for which the loop has listened.
    """

    def __init__(self, name: str, secret: Secret, address: str, log: Log) -> None:
        self.name, self.secret, self.log = name, secret, log
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.listener = Listener(self.context, secret, address, log)
        except zmq.ZMQError:  # nothing can listen at the address
            self.context.destroy(linger=0)
            raise
        self.is_over, self.refusal = False, ""
        self.clock = LoopClock()
        self._begun_s = time.monotonic()  # when the loop started its current work
        self._poller = zmq.Poller()
        self._poller.register(self.listener.socket, zmq.POLLIN)
        self._links: list[Connection] = []

    @property
    def address(self) -> str:
        """Address at which the role listens."""
        return self.listener.address

    def link(self, address: str) -> Connection:
        """Return a new connection to another role, whose messages the loop handles."""
        link = Connection(self.context, self.secret, address, self.log)
        self._poller.register(link.socket, zmq.POLLIN)
        self._links.append(link)
        return link

    def unlink(self, link: Connection) -> None:
        """Close a connection that `link` returned."""
        self._poller.unregister(link.socket)
        self._links.remove(link)
        link.close()

    def reply(
        self, peer: bytes, request: WireMessage, kind: str, tensors: Any = (), **more: Any
    ) -> None:
        """Answer a request; the answer has the request's number."""
        fields = {"q": request.fields.get("q"), **more}
        self.listener.send(peer, WireMessage(kind, fields, tensors))

    def run(self, stop: threading.Event | None = None) -> None:
        """Run the loop until the job has ended or `stop` is set."""
        try:
            while not self.is_over and not (stop is not None and stop.is_set()):
                self.run_once()
        finally:
            self.close()

    def run_once(self) -> None:
        """Wait up to a tick for messages, handle all that have arrived, and run `tick` if due."""
        self._poller.poll(round(TICK_S * 1000))
        for peer, message in self.listener.receive():
            self._begun_s = time.monotonic()
            self.handle_or_refuse(peer, message)
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

    def handle_or_refuse(self, peer: bytes, message: WireMessage) -> None:
        """Handle a request from `peer`; refuse a malformed one."""
        try:
            self.handle(peer, message)
        except MISTAKES as error:
            self.log(f"refused: '{message.kind}': {type(error).__name__}: {error}")
            self.reply(peer, message, "refused", why=str(error))

    def handle(self, peer: bytes, message: WireMessage) -> None:
        """Handle a request from `peer`."""
        raise NotImplementedError

    def hear(self, link: Connection, message: WireMessage) -> None:
        """Handle a message from a connection that this role has opened."""

    def tick(self) -> None:
        """Do periodic work."""
        self.clock.look()

    def close(self) -> None:
        """Close all sockets."""
        self.listener.close()
        self.context.destroy(linger=200)


class Member(Role):
    """A role that sends heartbeats to the coordinator and receives its map.

    Attributes:
        map: latest map from the coordinator.
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
        """Return the fields that the role adds to its heartbeats."""
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
        """Store a map unless it is older than the current map."""
        of_found, of_map = ((each["term"], each["epoch"]) for each in (found, self.map))
        if of_found < of_map:
            self.log(f"ignored a map of term {found['term']}, epoch {found['epoch']}")
            return
        self.map = found
        self.is_over = self.is_over or bool(found.get("ended"))
        if of_found != of_map:
            self.changed()

    def changed(self) -> None:
        """React to a map of a new term or epoch."""

    @override
    def tick(self) -> None:
        """Send a heartbeat with this role's facts every `BEAT_S`."""
        super().tick()
        if time.monotonic() - self._beat_s > BEAT_S:
            self._beat_s = time.monotonic()
            if self.clock.now_s - self._silent_s > SILENT_S:
                self._silent_s = self.clock.now_s
                self.log(no_answer(self._coordinator.address))
            if self.map["term"] == 0 and self.clock.now_s > MEET_S:
                self.refusal = no_answer(self._coordinator.address)
                self.is_over = True
            fields = {"name": self.name, "role": self.kind, "address": self.address}
            fields |= {name: self.map[name] for name in ("term", "epoch")}
            more = {"incarnation": self.incarnation, **self.facts()}
            self._coordinator.send(WireMessage("beat", {**fields, **more}))
