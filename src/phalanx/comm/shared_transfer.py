"""A collective through shared memory while it runs.

[Note: Progress] No background thread runs collectives while a rank computes. A rank advances a
collective when it starts it, and then only while it waits for this or another collective: a wait
advances all that the rank has started. So two ranks may wait for two of them in different orders.
The steps run unwatched, see [Note: Unwatched] in comm.watch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Final

from typing_extensions import override

from phalanx.comm.channels import TICK_S, AwaitedWord, Channels
from phalanx.comm.ranges import named as trace_named
from phalanx.comm.transfer import Transfer
from phalanx.comm.waits import waiting
from phalanx.comm.watch import unwatched

CROWDED_TICK_S: Final = 1e-3
"""Time a rank sleeps for one collective while it has started others, in seconds."""

UNDER_WAY: Final[list[SharedTransfer]] = []
"""Collectives that this process has started and that have not ended, in the order of starts."""

_ADVANCE_LOCK: Final = threading.RLock()
"""Lock to advance a collective, because several threads may wait for the same collective."""

Steps = Generator[AwaitedWord]


class SharedTransfer(Transfer):
    """A shared-memory collective; `steps` yields each word of a peer that it must wait for.

    Attributes:
        has_ended: whether the output is complete.
        on_end: called when it is, if that is later; None for nothing.
    """

    def __init__(self, steps: Steps, channels: Channels) -> None:
        super().__init__(())
        self._steps = steps
        self._channels = channels
        self._need: AwaitedWord | None = None
        self.has_ended = False
        self.on_end: Callable[[], None] | None = None
        self._error: BaseException | None = None
        with _ADVANCE_LOCK:
            UNDER_WAY.append(self)
            self.advance()

    def advance(self) -> AwaitedWord | None:
        """Run steps until one must wait; return the word to wait for, or None at the end.

        If a step raises an error, this and each later call raise it.
        """
        with _ADVANCE_LOCK:
            while not self.has_ended and (self._need is None or self._need.is_met()):
                try:
                    with unwatched():
                        self._need = next(self._steps)
                except StopIteration:
                    self._end()
                except BaseException as error:
                    self._error = error
                    self._end()
            if self._error is not None:
                raise self._error
            return self._need

    def _end(self) -> None:
        self.has_ended, self._need = True, None
        UNDER_WAY.remove(self)
        if self.on_end is not None:
            self.on_end()

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the output is complete; the timeout is the job's, not the argument.

        Raises:
            PeerLost: a rank has ended, or has timed out.
            CollectiveMismatch: a rank has called another collective.
        """
        if not self.is_waited_for:
            with trace_named("wait shared memory"), waiting(self.tensor, self.axis):
                begun_s = time.monotonic()
                while (need := self.advance()) is not None:
                    # While this rank sleeps for one collective, a peer may wait for a later one of
                    # the two, which only this thread advances: so it sleeps for CROWDED_TICK_S at
                    # most, and advances all again.
                    others = [other for other in [*UNDER_WAY] if other is not self]
                    needs = [need, *(other.advance() for other in others)]  # see [Note: Progress]
                    # A call that waits for an earlier one of this rank waits for a peer in the end.
                    of_peers = (each for each in needs if each and not self._channels.is_own(each))
                    need = next(of_peers, need)
                    self._channels.sleep(need, begun_s, CROWDED_TICK_S if others else TICK_S)
            self.is_waited_for, self.tensor = True, None  # later its memory may be freed
        return True
