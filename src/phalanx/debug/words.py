"""What the ranks leave for each other in the job's store under the check, and how they wait there.

The first verdict that a rank finds holds for all. A rank that waits looks for it now and then, and
whether those that it waits for wait for it in turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from phalanx.comm.join import job_store
from phalanx.debug.deadlock import Edge, WaitGraph
from phalanx.debug.fingerprint import Fingerprint
from phalanx.errors import CollectiveMismatch, named

LOOK_S = 0.25
"""How long a rank waits before it looks, again and again, where the others are."""

GRACE_S = 5.0
"""How long a rank waits for one that an error of its own has ended, and which is to say so."""

LEFT = "left"


class Words:
    """One rank's part in what the ranks say.

    Attributes:
        rank: this one.
        limit_s: how long the ranks wait for one that does not come, in seconds.
        store: of one check.
    """

    def __init__(self, limit_s: float) -> None:
        self.rank = dist.get_rank()
        self.limit_s = limit_s
        store = job_store()
        # Each rank counts its own, and all make the same: what an earlier check left, is not read.
        self.store = dist.PrefixStore(f"check/{store.add(f'checks/{self.rank}', 1)}", store)
        self._graph = WaitGraph(self.store, self.rank)

    @contextmanager
    def held(self) -> Generator[None]:
        """Say what it means that the store cannot be reached."""
        try:
            yield
        except dist.DistNetworkError as error:
            raise CollectiveMismatch(
                "the calls of the ranks cannot be compared any more: the process that holds "
                "the job's store (rank 0, or torchrun's own) has ended; its last words say why",
                self.rank,
            ) from error

    def poll(
        self, is_over: Callable[[], bool], look: Callable[[float], None], longest_s: float
    ) -> None:
        """Return when a wait is over; call `look` now and then, with the time that it has taken."""
        self._graph.begin()
        began_s = time.monotonic()
        look_s, pause_s = began_s + LOOK_S, 20e-6
        try:
            while not is_over():
                now_s = time.monotonic()
                if now_s > look_s:
                    if self.store.check(["verdict"]):
                        raise self.verdict("")
                    look(now_s - began_s)
                    look_s = now_s + LOOK_S
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        finally:
            self._graph.end()

    def refuse_deadlock(self, edges: Sequence[Edge], words: str) -> None:
        """Raise if one of those that this rank waits for waits for it in turn."""
        if cycle := self._graph.cycle(edges, words):
            lines = "\n".join(cycle.values())
            raise self.verdict(
                f"deadlock: {named(sorted(cycle))} wait for each other\n{lines}\n"
                "Ranks must come to their calls and messages in one order."
            )

    def verdict(self, message: str) -> CollectiveMismatch:
        """Return the error that all ranks raise: the first that any of them found."""
        mine = json.dumps([message, self.rank])
        first, speaker = json.loads(self.store.compare_set("verdict", "", mine))
        return CollectiveMismatch(first, speaker)

    def read(self, key: str) -> str | None:
        """Return what a rank has left under a key; None if none has."""
        return self.store.get(key).decode() if self.store.check([key]) else None


def described(rank: int, call: Fingerprint) -> str:
    """Return a rank's call and its places in lines of a message."""
    places = ", called from ".join(call.places) or "a thread without a place in Python"
    return f"  rank {rank}: {call}\n{'':10}at {places}"
