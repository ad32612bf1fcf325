"""What the ranks of a job tell each other over its store: beats, and who failed first."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from phalanx.launch.pulse import Beat
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.roll import Roll

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Failed:
    """The first error of the job that a rank met by itself; `host` is its host's first rank."""

    rank: int
    host: int
    name: str
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.name} failed first: {self.message}"


class Bulletin:
    """One rank's way to tell the others and to hear of them.

    Attributes:
        names: host of each rank heard of.
        processes: process of each rank of this host; empty until all ranks of the job are there.
        reached_s: when the store last answered.
    """

    def __init__(self, store: Store, env: RankEnv, timeout_s: float) -> None:
        """Say that this rank is there; see `Watch`."""
        self._store, self._rank, self._here = store, env.rank, env.here
        self._number = 0
        self._heard: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.processes: dict[int, int] = {}
        store.set_timeout(timedelta(seconds=timeout_s))
        self.send(Beat())
        if store.add("ranks", 1) == env.num_ranks:
            store.set("all ranks", "")

    def send(self, beat: Beat) -> None:
        """Tell where this rank stands."""
        self._number += 1
        words = [self._number, socket.gethostname(), os.getpid(), vars(beat)]
        self._store.set(f"beat/{self._rank}", json.dumps(words))
        self._store.check([f"beat/{self._rank}"])  # an answer, which setting has not
        self.reached_s = time.monotonic()

    def are_all_there(self) -> bool:
        """Return whether each rank has told of itself at least once."""
        if not self.processes and self._store.check(["all ranks"]):
            texts = self._store.multi_get([f"beat/{rank}" for rank in self._here])
            processes = [json.loads(text)[2] for text in texts]
            self.processes = dict(zip(self._here, processes, strict=True))
        return bool(self.processes)

    def read(self, ranks: range, roll: Roll) -> None:
        """Enter the beats of some ranks, all of which are there, into a roll."""
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        for rank, text in zip(ranks, texts, strict=True):
            number, self.names[rank], _, beat = json.loads(text)
            if self._heard.get(rank) != number:
                self._heard[rank] = number
                roll.hear(rank, Beat(**beat))

    def failed(self) -> Failed | None:
        """Return who failed first."""
        is_known = self._store.check(["failed"])
        return Failed(**json.loads(self._store.get("failed"))) if is_known else None

    def fail(self, message: str) -> bool:
        """Tell of this rank's error; return whether another rank of this host has told the same."""
        mine = Failed(self._rank, self._here.start, socket.gethostname(), message[:1000])
        with suppress(RuntimeError):  # without the store each tells its own
            for key in ("failed", f"failed/{mine.host}"):
                text = self._store.compare_set(key, "", json.dumps(vars(mine))).decode()
                first = Failed(**json.loads(text))
                if first == mine or first.message != mine.message:
                    return False
                if first.host == mine.host:
                    return True
        return False
