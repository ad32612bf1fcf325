"""The message loop of coordinator, servers and scheduler, and the membership of the latter two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from phalanx.launch.lease import ListeningClock
from phalanx.server.liveness import BEAT_S, LOOP_S, TICK_S
from phalanx.server.message import WireError, WireMessage, answer
from phalanx.server.message_table import Dispatch
from phalanx.server.secret import Secret
from phalanx.server.wire import Connection, Listener, Log

SILENT_S: Final = 10.0
"""Silence of the coordinator before it is reported, and between two reports, in seconds."""

MEET_S: Final = 600.0
"""Time after which a role exits that has never heard of its coordinator, in seconds."""

MISTAKES: Final = (
    WireError, KeyError, TypeError, ValueError, IndexError, OverflowError, StopIteration
)  # fmt: skip
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
        kind: receiver of its messages in the table of message_table.py.
        name: name of the role in the job.
        address: address at which the role listens.
        is_over: whether the loop must exit.
        refusal: reason why the role exits before the job ends, such as a refusal by the
            coordinator; empty if there is none.
        clock: time for which the loop has listened.
        begun_s: time at which the loop started its current work, by `time.monotonic`.
    """

    kind: str

    def __init__(self, name: str, secret: Secret, address: str, log: Log) -> None:
        self.name, self.secret, self.log = name, secret, log
        self.dispatch = Dispatch(self.kind, self)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.listener = Listener(self.context, secret, address, log)
        except zmq.ZMQError:  # nothing can listen at the address
            self.context.destroy(linger=0)
            raise
        self.address = self.listener.address
        self.is_over, self.refusal = False, ""
        self.clock, self.begun_s = ListeningClock(LOOP_S), time.monotonic()
        self._poller = zmq.Poller()
        self._poller.register(self.listener.socket, zmq.POLLIN)
        self._links: dict[Connection, Callable[[WireMessage], None]] = {}

    def link(self, address: str, hear: Callable[[WireMessage], None]) -> Connection:
        """Return a new connection to another role; the loop passes its messages to `hear`."""
        link = Connection(self.context, self.secret, address, self.log)
        self._poller.register(link.socket, zmq.POLLIN)
        self._links[link] = hear
        return link

    def unlink(self, link: Connection) -> None:
        """Close a connection that `link` returned."""
        self._poller.unregister(link.socket)
        del self._links[link]
        link.close()

    def reply(self, peer: bytes, request: WireMessage, reply: WireMessage) -> None:
        """Answer a request; the answer gets the request's number."""
        fields = {"q": request.fields.get("q"), **reply.fields}
        self.listener.send(peer, WireMessage(reply.kind, fields, reply.tensors))

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
            self.begun_s = time.monotonic()
            self.handle_or_refuse(peer, message)
        # Collected first: handling a message may open or close connections.
        heard = [(link, each) for link in self._links for each in link.receive()]
        for link, message in heard:
            self.begun_s = time.monotonic()
            hear = self._links.get(link)
            try:
                if hear is not None:  # else another message has closed the connection
                    hear(message)
            except MISTAKES as error:
                self.log(f"ignored: '{message.kind}': {type(error).__name__}: {error}")
        self.begun_s = time.monotonic()
        if self.begun_s - self.clock.ticked_s > TICK_S:
            self.tick()

    def handle_or_refuse(self, peer: bytes, message: WireMessage) -> None:
        """Handle a request from `peer`; refuse a malformed one."""
        try:
            self.handle(peer, message)
        except MISTAKES as error:
            self.log(f"refused: '{message.kind}': {type(error).__name__}: {error}")
            self.reply(peer, message, answer("refused", why=str(error)))

    def handle(self, peer: bytes, message: WireMessage) -> None:
        """Handle a request from `peer` by its method, and send the answer that this returns."""
        reply: WireMessage | None = self.dispatch.method(message)(message)
        if reply is not None:
            self.reply(peer, message, reply)

    def tick(self) -> None:
        """Do periodic work."""
        self.clock.tick()

    def close(self) -> None:
        """Close all sockets."""
        self.listener.close()
        self.context.destroy(linger=200)


class Membership:
    """A role's membership of a job: it sends heartbeats to the coordinator, and keeps the map.

    Attributes:
        map: latest map from the coordinator.
        coordinator: connection to the coordinator.
    """

    def __init__(
        self, role: Role, coordinator: str, incarnation: str, facts: Callable[[], Settings],
        changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Join; beats have `facts()`, and a map of a new term or epoch calls `changed`."""
        self.incarnation, self.facts = incarnation, facts
        self.map: Settings = {"epoch": 0, "term": 0}
        self._role, self._changed = role, changed
        self.coordinator = role.link(coordinator, self.hear)
        self._beat_s = self._silent_s = 0.0

    def hear(self, message: WireMessage) -> None:
        """Handle a message from the coordinator: a map, or a refusal, which ends the role."""
        if message.kind == "refused":
            self._role.refusal = f"the coordinator refuses {self._role.name}: {message['why']}"
            self._role.log(self._role.refusal)
            self._role.is_over = True
        elif message.kind == "map":
            self._silent_s = self._role.clock.now_s
            self.take(dict(message.fields))

    def take(self, later: Settings) -> None:
        """Store a map unless it is older than the current map."""
        of_later, of_map = ((each["term"], each["epoch"]) for each in (later, self.map))
        if of_later < of_map:
            self._role.log(f"ignored a map of term {later['term']}, epoch {later['epoch']}")
            return
        self.map = later
        self._role.is_over = self._role.is_over or bool(later.get("ended"))
        if of_later != of_map:
            self._changed()

    def tick(self) -> None:
        """Send a heartbeat every `BEAT_S`; report a silent coordinator."""
        if time.monotonic() - self._beat_s <= BEAT_S:
            return
        role, self._beat_s = self._role, time.monotonic()
        if role.clock.now_s - self._silent_s > SILENT_S:
            self._silent_s = role.clock.now_s
            role.log(no_answer(self.coordinator.address))
        if self.map["term"] == 0 and role.clock.now_s > MEET_S:
            role.refusal, role.is_over = no_answer(self.coordinator.address), True
        fields = {"name": role.name, "role": role.kind, "address": role.address}
        fields |= {name: self.map[name] for name in ("term", "epoch")}
        more = {"incarnation": self.incarnation, **self.facts()}
        self.coordinator.send(WireMessage("beat", {**fields, **more}))
