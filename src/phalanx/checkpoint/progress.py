"""How the writers of a job's ranks report to each other how far they are, and when they give up.

Each rank keeps one line in the store at which the ranks have met; rank 0 reads them all, decides,
and keeps one line of its own that all others read:

    rank r    opened or written? bytes so far, or the checksum of its file, or what went wrong
    rank 0    a beat, while it waits; at last what became of the save

There are no collectives, so nobody waits for a call that does not come. A wait ends when nothing
has moved for `timeout_s`: a slow disk may take as long as it likes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Literal

import torch.distributed as dist

from phalanx.comm.join import job_store
from phalanx.errors import CheckpointError, PeerLost, named

POLL_S: Final = 0.05
"""How often a rank looks at the others, in the long run; thousands of ranks look less often."""

GONE_S: Final = 10.0
"""How long nothing may move once a rank is known to be lost, in seconds."""

GRACE_S: Final = 5.0
"""How much longer than rank 0 another rank waits: rank 0 knows who is late."""

State = Literal["writing", "written", "failed"]
"""Of a rank: its value is bytes, a checksum or words."""


class SaveProgress:
    """The state of the save under way on every rank, as this one knows it.

    `begin`, `is_late` and `expect_loss` are for the main thread, all else for the writer's.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """Meet the others; every rank calls this together.

        The name is the same on every rank and for no other exchange; nothing may stand still for
        longer than `timeout_s`.
        """
        self.rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self._poll_s = POLL_S + self._num_ranks / 4000
        store = job_store()
        store.set_timeout(timedelta(seconds=timeout_s + GRACE_S))
        self._store: Any = dist.PrefixStore(f"checkpoint/{name}", store)
        self._number, self._beat = 0, 0
        self._is_loss_expected = False
        self._failed = (0, "", False)
        self._seen: dict[str, tuple[Any, float]] = {}
        self._reported_s = self._moved_s = time.monotonic()
        self._store.set(str(self.rank), "[0]")
        if self.rank == 0:
            self.conclude("published")

    def begin(self) -> None:
        """Begin with the next save."""
        self._number += 1
        self._moved_s = time.monotonic()
        self._seen = {}

    def expect_loss(self) -> None:
        """Wait no longer than `GONE_S` for what does not move, since a rank is lost.

        The ranks that are left still publish a save to which the lost one owes nothing.
        """
        self.timeout_s = min(self.timeout_s, GONE_S)
        self._is_loss_expected = True

    def _error(self, words: str) -> CheckpointError | PeerLost:
        """Return the error of a save that stands still: by a rank that is lost, if one is."""
        return (PeerLost if self._is_loss_expected else CheckpointError)(words)

    @property
    def is_late(self) -> bool:
        """Whether this rank has seen nothing move for longer than rank 0 would wait."""
        return time.monotonic() - self._moved_s > self.timeout_s + GRACE_S

    def moved(self, num_bytes: int) -> None:
        """Report that this rank has written some of its bytes.

        Raises:
            CheckpointError: the save is given up, by another rank's fault.
        """
        self._moved_s = time.monotonic()
        if self._moved_s - self._reported_s > self._poll_s:
            self.report("writing", num_bytes)
            self.look()

    def report(self, state: State, value: Any) -> None:
        """Report to the others how this rank is."""
        self._reported_s = time.monotonic()
        self._store.set(str(self.rank), json.dumps([self._number, state, value]))

    def wait(self) -> list[Any]:
        """Return how each rank is, on rank 0 once all have written; elsewhere once it is published.

        Raises:
            CheckpointError: the save is given up, or rank 0 gives no sign.
        """
        goal = [self._number, "written" if self.rank == 0 else "published"]
        # Rank 0 may be at the next save already.
        states = self._look_until(lambda state: state[:2] == goal or state[0] > self._number)
        return [state[2] for state in states]

    def wait_to_begin(self) -> None:
        """Return once rank 0 has made the folder.

        Raises:
            CheckpointError: it could not, or gives no sign.
        """
        self._look_until(lambda state: state[0] >= self._number)

    def _look_until(self, is_so: Callable[[Any], bool]) -> list[Any]:
        """Look again and again until it is so of all; a short wait is no tenth longer for that."""
        begin_s = time.monotonic()
        while not all(map(is_so, states := self.look())):
            time.sleep(min(self._poll_s, 0.1 * (time.monotonic() - begin_s) + 0.001))
        return states

    def look(self) -> list[Any]:
        """Return how each rank is, on rank 0; elsewhere what rank 0 says of the save.

        Raises:
            CheckpointError: a rank has failed, or is late; or rank 0 has given the save up, in its
                own words.
            PeerLost: a rank is late, and one is known to be lost, here or by rank 0.
            TimeoutError: rank 0 gives no sign.
        """
        return self._look_at_all() if self.rank == 0 else self._look_at_first()

    def conclude(
        self, outcome: Literal["open", "published", "failed"], error: Exception | None = None
    ) -> None:
        """Report to the others what became of the save; rank 0 calls this."""
        self._beat += 1
        if outcome == "failed":
            self._failed = (self._number, str(error), isinstance(error, PeerLost))
        self._store.set("first", json.dumps([self._number, outcome, self._failed, self._beat]))

    def _look_at_all(self) -> list[Any]:
        lines = self._store.multi_get([str(rank) for rank in range(self._num_ranks)])
        states = [json.loads(line) for line in lines]
        self.conclude("open")
        late: list[int] = []
        for rank, state in enumerate(states):
            self._note(str(rank), state)
            if state[0] == self._number and state[1] == "failed":
                raise CheckpointError(state[2])
            still_s = time.monotonic() - self._seen[str(rank)][1]
            if state[:2] != [self._number, "written"] and still_s > self.timeout_s:
                late.append(rank)
        if late:
            num_bytes = [states[r][2] if states[r][0] == self._number else 0 for r in late[:8]]
            raise self._error(
                f"{named(late)} had not written {'their' if len(late) > 1 else 'its'} shards "
                f"({', '.join(map(str, num_bytes))} bytes so far) and made no progress for "
                f"{self.timeout_s:g} s"
            )
        return states

    def _look_at_first(self) -> list[Any]:
        state = json.loads(self._store.get("first"))
        self._note("first", state)
        if state[2][0] == self._number:
            raise (PeerLost if state[2][2] else CheckpointError)(state[2][1])
        if self.is_late:
            raise TimeoutError(str(self.silence()))
        return [state]

    def silence(self) -> CheckpointError | PeerLost:
        """Return what this rank can say when nothing moves any more."""
        waited_s = time.monotonic() - self._moved_s
        who = "this rank's disk takes" if self.rank == 0 else "rank 0, which publishes it, says"
        return self._error(f"{who} nothing for {waited_s:.0f} s")

    def _note(self, who: str, state: Any) -> None:
        if who not in self._seen or self._seen[who][0] != state:
            self._moved_s = time.monotonic()
            self._seen[who] = (state, self._moved_s)
