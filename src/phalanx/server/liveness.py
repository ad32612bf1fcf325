"""Who is live: leases, the clock that counts them, and the thread that sends heartbeats.

A process that is stopped, or waits for a CPU, receives nothing: messages of its peers wait in its
sockets. So an observer counts silence only while its own loop runs (`LoopClock`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Final

import zmq

from phalanx.server.message import WireMessage
from phalanx.server.secret import Secret
from phalanx.server.wire import Connection, Log

TICK_S: Final = 0.05
"""Longest wait of a role's loop for a message, in seconds."""

BEAT_S: Final = 0.5
"""Interval between heartbeats of a member of the job, in seconds."""

RESEND_S: Final = 0.5
"""Time after which an unanswered request is sent again, in seconds, see [Note: Sent again]."""

LEASE_S: Final = 3.0
"""Silence after which a worker or a server is lost, in seconds in which its observer listens."""


class LoopClock:
    """Counts the seconds in which a loop ran.

    Attributes:
        now_s: seconds counted so far.
        looked_s: time of the last `look`, by `time.monotonic`.
    """

    def __init__(self, most_s: float = 4 * TICK_S) -> None:
        """Start at 0; the time between two calls of `look` counts as at most `most_s`."""
        self.now_s, self.looked_s = 0.0, time.monotonic()
        self._most_s = most_s

    def look(self) -> None:
        """Add the time since the last call."""
        looked_s, self.looked_s = self.looked_s, time.monotonic()
        self.now_s += min(self.looked_s - looked_s, self._most_s)


class Leases:
    """The members that an observer watches; a lease is over after `LEASE_S` of silence.

    Attributes:
        heard_s: member -> time by the observer's clock at which it was heard; -inf if it has left.
    """

    def __init__(self, now_s: Callable[[], float], members: Iterable[Hashable] = ()) -> None:
        """Watch `members` from now on; `now_s` returns the time by the observer's clock."""
        self._now_s = now_s
        self.heard_s = dict.fromkeys(members, now_s())

    def renew(self, member: Hashable) -> None:
        """Record that a member is live."""
        self.heard_s[member] = self._now_s()

    def end(self, member: Hashable) -> None:
        """Record that a member has left."""
        self.heard_s[member] = -math.inf

    def has_left(self, member: Hashable) -> bool:
        """Return whether `end` was called for a member and `renew` was not called since."""
        return self.heard_s.get(member) == -math.inf

    def is_over(self, member: Hashable) -> bool:
        """Return whether a member has left, or was silent for `LEASE_S`."""
        return self._now_s() - self.heard_s[member] > LEASE_S


class HeartbeatThread:
    """A thread that sends one message every `BEAT_S`, also while the main thread computes.

    Adam over a shard of a few GB takes longer than a lease, and so does a step of a worker. If the
    process is stopped, so is the thread. Its connection is its own, and its message has no state,
    so the order relative to other messages does not matter.
    """

    def __init__(
        self, secret: Secret, log: Log, message: WireMessage, receiver: Callable[[], str],
        hear: Callable[[WireMessage], object] = lambda _: None,
    ) -> None:  # fmt: skip
        """Start; `receiver` returns the current address or "", and `hear` handles answers."""
        self._secret, self._log, self._message = secret, log, message
        self._receiver, self._hear = receiver, hear
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait for its end."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its I/O thread sends no weights
        links: dict[str, Connection] = {}
        pause_s = TICK_S
        while not self._ended.wait(pause_s):
            pause_s = BEAT_S
            if address := self._receiver():
                if address not in links:
                    links[address] = Connection(context, self._secret, address, self._log)
                for answer in links[address].receive():
                    self._hear(answer)
                links[address].send(self._message)
                pause_s = BEAT_S if links[address].is_open else TICK_S
        for link in links.values():
            link.close()
        context.destroy(linger=0)
