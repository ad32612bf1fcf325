"""The feed of liveness: a job is a store, to which each of its ranks writes heartbeats.

                      local ranks                        torchrun, Slurm
    store             the parent hosts it                torchrun, or rank 0 under Slurm
    rank -> store     Feed.send, every second            Feed.send, every 2 s or more (`watch`)
    store -> reader   Feed.read by the parent (`local`)  Feed.read by a rank of each host (`watch`)
    reader            HeartbeatMonitor: reports ranks that are silent, are stopped or delay others

The clocks of hosts differ, so a heartbeat has no time. It arrives, by the reader's clock, when the
reader sees that its number has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from phalanx.launch.heartbeat import Beat

if TYPE_CHECKING:
    from torch.distributed import Store

    from phalanx.launch.heartbeat_monitor import HeartbeatMonitor


class Feed:
    """The heartbeats of a job in its store: writer of this process's, reader of all."""

    def __init__(self, store: Store, rank: int = -1) -> None:
        """Use `store`, whose connection is this object's own; `rank` is the writer's."""
        self._store, self._rank = store, rank
        self._process = os.getpid()
        self._number = 0
        self._texts: dict[int, bytes] = {}

    def send(self, beat: Beat) -> None:
        """Write a heartbeat of this rank, and wait until the store has it; not in a fork."""
        if os.getpid() != self._process:
            return
        self._number += 1
        self._store.set(f"beat/{self._rank}", json.dumps([self._number, vars(beat)]))
        self._store.check([f"beat/{self._rank}"])  # waits for a response, which `set` does not

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks, of `ranks`, that have sent no heartbeat."""
        unknown = [rank for rank in ranks if rank not in self._texts]
        if not unknown or self._store.check([f"beat/{rank}" for rank in unknown]):
            return []
        return [rank for rank in unknown if not self._store.check([f"beat/{rank}"])]

    def read(self, ranks: Iterable[int], monitor: HeartbeatMonitor) -> None:
        """Record the new heartbeats of `ranks` in a monitor."""
        # `multi_get` of a key that is not set would block until the timeout of the store.
        there = sorted({*ranks} - {*self.missing(ranks)})
        texts = self._store.multi_get([f"beat/{rank}" for rank in there]) if there else []
        for rank, text in zip(there, texts, strict=True):
            if self._texts.get(rank) != text:
                self._texts[rank] = text
                monitor.record(rank, Beat(**json.loads(text)[1]))
