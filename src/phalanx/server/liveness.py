"""Intervals of heartbeats and leases, and the thread that sends heartbeats; see launch/lease.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
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

LOOP_S: Final = 4 * TICK_S
"""Most that a role's loop counts as listening between two looks, in seconds."""

LEASE_S: Final = 3.0
"""Silence after which a worker or a server is lost, in seconds in which its observer listens."""


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
