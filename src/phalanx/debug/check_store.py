"""The check's part of the job's store: the verdict, polling waits and deadlock detection.

The first error that a rank finds, the verdict, is raised by all ranks. A rank that waits checks
every LOOK_S for a verdict, and for a cycle of waits.
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
"""Interval, in seconds, at which a waiting rank checks the state of the other ranks."""

GRACE_S = 5.0
"""Time, in seconds, that a rank which ended by an error has to report it before others raise."""

LEFT = "left"


class CheckStore:
    """One rank's view of the store of a check.

    Attributes:
        rank: global rank of this process.
        limit_s: longest wait for a rank that does not arrive, in seconds.
        store: the job's store with a prefix for this check.
    """

    def __init__(self, limit_s: float) -> None:
        self.rank = dist.get_rank()
        self.limit_s = limit_s
        store = job_store()
        # Each rank counts its checks, and all make the same ones: keys of an earlier check differ.
        self.store = dist.PrefixStore(f"check/{store.add(f'checks/{self.rank}', 1)}", store)
        self._graph = WaitGraph(self.store, self.rank)

    @contextmanager
    def explaining_lost_store(self) -> Generator[None]:
        """Convert a lost connection to the store into a CollectiveMismatch that explains it."""
        try:
            yield
        except dist.DistNetworkError as error:
            raise CollectiveMismatch(
                "the calls of the ranks can no longer be compared: the process that runs the "
                "job's store (rank 0, or torchrun's own) has ended; its last output says why",
                self.rank,
            ) from error

    def poll(
        self, is_over: Callable[[], bool], look: Callable[[float], None], longest_s: float
    ) -> None:
        """Poll until `is_over()`; call `look(seconds waited)` every LOOK_S, and raise a verdict."""
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

    def refuse_deadlock(self, edges: Sequence[Edge], description: str) -> None:
        """Raise if the waits of this rank, `edges`, which are described, are part of a cycle."""
        if cycle := self._graph.cycle(edges, description):
            lines = "\n".join(cycle.values())
            raise self.verdict(
                f"deadlock: {named(sorted(cycle))} wait for each other\n{lines}\n"
                "All ranks must make their calls and messages in the same order."
            )

    def verdict(self, message: str) -> CollectiveMismatch:
        """Return the error that all ranks raise: the first message that any rank has stored."""
        mine = json.dumps([message, self.rank])
        first, speaker = json.loads(self.store.compare_set("verdict", "", mine))
        return CollectiveMismatch(first, speaker)

    def read(self, key: str) -> str | None:
        """Return the value of a key in the store, or None if the key is not set."""
        return self.store.get(key).decode() if self.store.check([key]) else None


def described(rank: int, call: Fingerprint) -> str:
    """Return the lines of a message that describe a rank's call and its places."""
    places = ", called from ".join(call.places) or "a thread without a place in Python"
    return f"  rank {rank}: {call}\n{'':10}at {places}"
