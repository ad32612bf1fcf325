"""A link of limited rate, to measure how a strategy would run between slower hosts.

A thread of each rank holds every message back for its bytes / rate, one after another, and then
lets the engine of the group start it. The calling thread computes meanwhile, as with a real link:

    this thread    begin 1, begin 2, compute ...........  wait 1      wait 2
    link           | bytes of 1 / rate | bytes of 2 / rate |
    engine                             start 1 ...          start 2 ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from phalanx.comm.ledger import sent_by
from phalanx.comm.transfer import CommEngine, Transfer
from phalanx.comm.waits import waiting
from phalanx.comm.watch import call


class SlowLink:
    """The link of one rank, which sends `bytes_per_s` over all its axes together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slow link")

    def send(self, num_bytes: float, start: Callable[[], dist.Work | None]) -> Transfer:
        """Return a transfer that `start` begins when the link has sent the bytes before and its."""
        self._free_s = max(time.monotonic(), self._free_s) + num_bytes / self._bytes_per_s

        def hold(until_s: float) -> dist.Work | None:
            time.sleep(max(0.0, until_s - time.monotonic()))
            return start()

        return _Held(self._thread.submit(hold, self._free_s))


class _Held(Transfer):
    """A collective that the link holds back, or that it has started."""

    def __init__(self, started: Future[dist.Work | None]) -> None:
        super().__init__(())
        self._started = started

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_waited_for:
            with waiting(self.tensor, self.axis):
                work = self._started.result()
            if isinstance(work, Transfer):  # its `wait` notifies listeners itself
                work.tensor, work.axis = self.tensor, self.axis
                work.wait()
            elif work is not None:
                with waiting(self.tensor, self.axis):
                    work.wait()
            self.is_waited_for = True
        return True


class SlowEngine(CommEngine):
    """An engine whose messages pass a slow link before `engine` runs them."""

    def __init__(self, engine: CommEngine, link: SlowLink) -> None:
        super().__init__(engine.group)
        self.axis = engine.axis
        self._engine = engine
        self._link = link

    @override
    def begin(
        self, op: str, out: Tensor, given: Tensor, option: Any = None, *, is_spent: bool = False
    ) -> dist.Work | None:
        def start() -> dist.Work | None:
            return self._engine.begin(op, out, given, option, is_spent=is_spent)

        if op == "recv":  # the sender's link holds the message back
            return start()
        # Counted here, since watches do not see the link's thread.
        called = self.described(op, out, given, option)
        return call(called, lambda: self._link.send(sent_by(called), start))
