"""Coordinate the writer threads of all ranks through the job's store, with a timeout.

Each rank sets one key in the store. Rank 0 reads all of these, decides, and sets one more key that
all other ranks read:

    rank r    its state, with bytes so far, or checksums of its file, or an error message
    rank 0    the outcome of the save; while rank 0 waits, a heartbeat counter

There are no collectives, so a writer never blocks in a call that another rank does not make. A wait
times out only after `timeout_s` without any progress, so a slow disk may take as long as it needs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Literal

import torch.distributed as dist

from phalanx.comm.join import job_store
from phalanx.errors import CheckpointError, PeerLost, named
from phalanx.launch.lease import Leases

POLL_S: Final = 0.05
"""Largest seconds between two polls of the store, plus 1 s for every 4,000 ranks."""

LOST_TIMEOUT_S: Final = 10.0
"""Timeout without progress once a rank is known to be lost, in seconds."""

GRACE_S: Final = 5.0
"""Seconds that other ranks wait longer than rank 0, because rank 0 can name the late ranks."""

ANYONE: Final = "anyone"
"""Name of the lease that each sign of progress renews."""

State = Literal["writing", "written", "failed"]
"""State of a rank's writer; its value is bytes so far, checksums, or an error message."""


class SaveGivenUp(Exception):
    """The writer of a save that was given up calls a method after the next save has begun."""


class SaveProgress:
    """The progress of the current save on every rank, as far as this rank has read it.

    The main thread calls `begin`, `is_late`, `expect_loss` and `timeout_error`; the writer thread
    calls the other methods with the number of its save, and `timeout_error` too. They raise
    SaveGivenUp unless that save is the current one, so that a writer that was stuck and resumes
    reports nothing in the name of a later save.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """Register this rank in the store; every rank calls this together.

        Args:
            name: key prefix in the store, equal on all ranks and unique to this object.
            timeout_s: largest seconds without progress before a save fails.
        """
        self.rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self._poll_s = POLL_S + self._num_ranks / 4000
        store = job_store()
        store.set_timeout(timedelta(seconds=timeout_s + GRACE_S))
        self._store: Any = dist.PrefixStore(f"checkpoint/{name}", store)
        self._number, self._beat = 0, 0
        self._lock = threading.Lock()
        self._is_loss_expected = False
        self._failed = (0, "", False)
        self._reported_s = time.monotonic()
        self._begin()
        self._store.set(str(self.rank), "[0]")
        if self.rank == 0:
            self.publish_outcome(0, "published")

    def begin(self) -> int:
        """Begin the next save, and restart the timeout; return the number of the save."""
        with self._lock:
            self._number += 1
            self._begin()
            return self._number

    def _begin(self) -> None:
        # The lease of a rank is renewed when the state that it publishes changes, `ANYONE`'s with
        # each of these and with the bytes that this rank writes.
        self._states: dict[str, Any] = {}
        self._leases = Leases(time.monotonic, [ANYONE])

    @contextmanager
    def _as_current(self, number: int) -> Generator[None]:
        """Keep the next save from beginning within the block; raise unless `number` is current."""
        with self._lock:
            if number != self._number:
                raise SaveGivenUp(f"save {number} was given up; the current one is {self._number}")
            yield

    def expect_loss(self) -> None:
        """Reduce the timeout to LOST_TIMEOUT_S, because a rank is lost.

        The remaining ranks still publish the save if the lost rank had written its file.
        """
        self.timeout_s = min(self.timeout_s, LOST_TIMEOUT_S)
        self._is_loss_expected = True

    def _error(self, message: str) -> CheckpointError | PeerLost:
        """Return the error of a save without progress: PeerLost if a rank is known to be lost."""
        return (PeerLost if self._is_loss_expected else CheckpointError)(message)

    @property
    def is_late(self) -> bool:
        """Whether this rank has seen no progress for longer than rank 0 would wait."""
        return self._leases.age_s(ANYONE) > self.timeout_s + GRACE_S

    def report_bytes(self, number: int, num_bytes: int) -> None:
        """Report the bytes that this rank has written, at most once per poll interval.

        Raises:
            CheckpointError: a rank has failed or is late, so that rank 0 aborts the save.
            PeerLost: a rank is late, and a rank is known to be lost.
        """
        with self._as_current(number):
            self._leases.renew(ANYONE)
        if time.monotonic() - self._reported_s > self._poll_s:
            self.report(number, "writing", num_bytes)
            self.look(number)

    def renew(self, number: int) -> None:
        """Note progress of this rank after the save was published, which only it has to know."""
        with self._as_current(number):
            self._leases.renew(ANYONE)

    def report(self, number: int, state: State, value: Any) -> None:
        """Publish this rank's state in the store."""
        with self._as_current(number):
            self._reported_s = time.monotonic()
            self._store.set(str(self.rank), json.dumps([number, state, value]))

    def wait(self, number: int) -> list[Any]:
        """Wait: on rank 0 until all ranks have written, elsewhere until rank 0 has published.

        Return the value of each state that was read: on rank 0 the checksums of each rank's file.

        Raises:
            CheckpointError: the save is aborted.
            PeerLost: the save is aborted because a rank is lost.
            TimeoutError: rank 0 makes no progress.
        """
        goal = [number, "written" if self.rank == 0 else "published"]
        # Rank 0 may have begun the next save already.
        states = self._look_until(number, lambda state: state[:2] == goal or state[0] > number)
        return [state[2] for state in states]

    def wait_to_begin(self, number: int) -> None:
        """Wait until rank 0 has created the folder of the save.

        Raises:
            CheckpointError: rank 0 could not create the folder.
            TimeoutError: rank 0 makes no progress.
        """
        self._look_until(number, lambda state: state[0] >= number)

    def _look_until(self, number: int, is_so: Callable[[Any], bool]) -> list[Any]:
        """Poll until `is_so` holds for all states; it adds about a tenth to the wait at most."""
        # The pause grows with the wait, so that a short save ends soon and a long one asks rarely.
        begin_s = time.monotonic()
        while not all(map(is_so, states := self.look(number))):
            time.sleep(min(self._poll_s, 0.1 * (time.monotonic() - begin_s) + 0.001))
        return states

    def look(self, number: int) -> list[Any]:
        """Read the store once: return on rank 0 the state of each rank, elsewhere rank 0's outcome.

        Raises:
            CheckpointError: a rank has failed or is late; on other ranks, with rank 0's message.
            PeerLost: a rank is late, and this rank or rank 0 knows that a rank is lost.
            TimeoutError: rank 0 makes no progress.
        """
        # What the keys of the store have, and who writes them:
        #
        #     "0" .. "N-1"    each rank     [save, state, bytes or files or error]
        #     "first"         rank 0        [save, "open" | "published", last failure, beat]
        #
        # The last failure stays in "first" when the next save begins, so that a rank that looks
        # late still learns that its save failed. The beat changes at each look of rank 0: it is
        # alive.
        if self.rank != 0:
            state = json.loads(self._store.get("first"))
            with self._as_current(number):
                self._note("first", state)
            if state[2][0] == number:
                raise (PeerLost if state[2][2] else CheckpointError)(state[2][1])
            if self.is_late:
                raise TimeoutError(str(self.timeout_error()))
            return [state]
        lines = self._store.multi_get([str(rank) for rank in range(self._num_ranks)])
        states = [json.loads(line) for line in lines]
        self.publish_outcome(number, "open")
        late: list[int] = []
        for rank, state in enumerate(states):
            self._note(str(rank), state)
            if state[0] == number and state[1] == "failed":
                raise CheckpointError(state[2])
            if state[:2] != [number, "written"] and self._leases.age_s(str(rank)) > self.timeout_s:
                late.append(rank)
        if late:
            num_bytes = [states[r][2] if states[r][0] == number else 0 for r in late[:8]]
            raise self._error(
                f"{named(late)} had not written {'their' if len(late) > 1 else 'its'} shards "
                f"({', '.join(map(str, num_bytes))} bytes so far) and made no progress for "
                f"{self.timeout_s:g} s"
            )
        return states

    def publish_outcome(
        self,
        number: int,
        outcome: Literal["open", "published", "failed"],
        error: Exception | None = None,
    ) -> None:
        """Publish the outcome of the save for the other ranks; only rank 0 calls this."""
        with self._as_current(number):
            self._beat += 1
            if outcome == "failed":
                self._failed = (number, str(error), isinstance(error, PeerLost))
            self._store.set("first", json.dumps([number, outcome, self._failed, self._beat]))

    def report_publishing(self, number: int) -> None:
        """Report progress of rank 0 while it publishes the checkpoint; only rank 0 calls this."""
        self.publish_outcome(number, "open")
        self._leases.renew(ANYONE)

    def timeout_error(self) -> CheckpointError | PeerLost:
        """Return the error of this rank for a save without progress."""
        waited_s = self._leases.age_s(ANYONE)
        who = "rank 0, which publishes the checkpoint,"
        who = "the write to this rank's disk" if self.rank == 0 else who
        return self._error(f"{who} made no progress for {waited_s:.0f} s")

    def _note(self, who: str, state: Any) -> None:
        if who not in self._states or self._states[who] != state:
            self._states[who] = state
            self._leases.renew(who)
            self._leases.renew(ANYONE)
