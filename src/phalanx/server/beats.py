"""A thread that says that its process is there, also while the process computes.

Adam over a shard of some GB takes longer than a lease, and so does a step of a worker. The thread
has a connection of its own. Its message carries no facts, so it may come before or after any other.
Whatever stops the process stops the thread.

A server that is at one message for `STUCK_S` (replica.py) falls silent, so that its backup takes
over. A worker never does: its step may take any time, and launch/board.py reports one that stands
still.
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
"""How often a member of the job says that it is there, in seconds."""


class Beats:
    """Sends one message every `BEAT_S`."""

    def __init__(
        self, secret: Secret, log: Log, message: WireMessage, whom: Callable[[], str],
        hear: Callable[[WireMessage], object] = lambda _: None,
    ) -> None:  # fmt: skip
        """Begin; `whom` returns the address to send it to, or nothing; `hear` takes the answers."""
        self._secret, self._log, self._message, self._whom = secret, log, message, whom
        self._hear = hear
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # weights go by another's thread
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
                pause_s = BEAT_S if links[address].is_welcome else TICK_S
        for link in links.values():
            link.close()
        context.destroy(linger=0)
