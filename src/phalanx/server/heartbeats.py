"""A heartbeat thread, which sends also while the main thread of its process computes.

Adam over a shard of a few GB takes longer than a lease, and so does a step of a worker. The thread
has a separate connection. Its message has no state, so its order relative to other messages does
not matter. If the process is stopped, so is the thread.

A server whose loop spends more than `STUCK_S` on one message (replica.py) stops its heartbeats, so
that its backup becomes primary. A worker never stops them: its step may take any time, and
launch/heartbeat_monitor.py reports a worker that makes no progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import zmq

from phalanx.server.loop_clock import TICK_S
from phalanx.server.message import WireMessage
from phalanx.server.secret import Secret
from phalanx.server.wire import Connection, Log

BEAT_S: Final = 0.5
"""Interval between heartbeats of a member of the job, in seconds."""


class HeartbeatThread:
    """A thread that sends one message every `BEAT_S`."""

    def __init__(
        self, secret: Secret, log: Log, message: WireMessage, whom: Callable[[], str],
        hear: Callable[[WireMessage], object] = lambda _: None,
    ) -> None:  # fmt: skip
        """Start; `whom` returns the current receiver's address or "", `hear` handles answers."""
        self._secret, self._log, self._message, self._whom = secret, log, message, whom
        self._hear = hear
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
            if address := self._whom():
                if address not in links:
                    links[address] = Connection(context, self._secret, address, self._log)
                for answer in links[address].receive():
                    self._hear(answer)
                links[address].send(self._message)
                pause_s = BEAT_S if links[address].is_open else TICK_S
        for link in links.values():
            link.close()
        context.destroy(linger=0)
