"""Watch a job from within each of its ranks, over the job's store: several hosts have no parent.

    messenger  beat -> store, every few seconds; reads the beats of all once this rank stands still
    watch      no network: tells who is silent, and ends this rank if that lasts for the timeout

The first rank of each host tells; the others of the host end without a word. A beat counts as heard
when its number has changed, by the reader's own clock: the clocks of hosts differ.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from phalanx.errors import PhalanxError, TrainingError, message_of, named
from phalanx.launch.pulse import PULSE, Beat
from phalanx.launch.roll import SILENT_S, Roll
from phalanx.launch.supervisor import tell

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_S: Final = 2.0
"""Seconds between two beats of a rank in a job of a few hundred ranks."""

RANKS_PER_BEAT_S: Final = 500
"""Beats that the store takes in a second, at most."""

CURIOUS_S: Final = 3.0
"""How long this rank stands still before it asks for the others, in seconds."""

WORDS_S: Final = 2.0
"""How long the disk may take to say which checkpoint stands, in seconds."""


class PeerFailed(TrainingError):
    """Another rank tells the error; this one ends with it."""


@dataclass(frozen=True)
class Failed:
    """The first error of the job that a rank met by itself.

    Attributes:
        rank: global rank.
        host: number of the first rank of its host.
        name: of its host.
        message: of the error.
    """

    rank: int
    host: int
    name: str
    message: str


class Watch:
    """Watches the job on one rank, as a context."""

    def __init__(
        self, store: Store, rank: int, num_ranks: int, host: int, timeout_s: float
    ) -> None:
        """Say that this rank is there.

        Args:
            store: of this call alone, over a connection of its own.
            rank: global rank.
            num_ranks: ranks in the job.
            host: first rank of this host.
            timeout_s: how long a rank or the store may be silent, in seconds.
        """
        self._store = store
        self._rank, self._num_ranks, self._host = rank, num_ranks, host
        self._timeout_s = timeout_s
        self._interval_s = max(BEAT_S, num_ranks / RANKS_PER_BEAT_S)
        # Among thousands of ranks a beat is old before it is read.
        self._silent_s = max(SILENT_S, 3 * self._interval_s)
        self._number = 0
        self._roll = Roll()
        self._heard: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._failed: Failed | None = None
        self._reached_s = time.monotonic()
        self._read_s = self._reached_s
        self._is_store_gone = False
        self._is_curious = False
        self._is_listening = False
        self._is_told_unreached = False
        self._last_word = threading.Lock()
        self._ended = threading.Event()
        self._beat = Beat()
        store.set_timeout(timedelta(seconds=timeout_s))
        self._send()

    def __enter__(self) -> Watch:
        for work in (self._deliver, self._watch):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    # The messenger.

    def _deliver(self) -> None:
        import torch.distributed as dist

        try:
            while not self._ended.wait(1.0 if self._is_curious else self._interval_s):
                self._send()
                self._listen(self._is_curious or self._beat.still_s > CURIOUS_S)
        except (dist.DistError, RuntimeError):
            self._is_store_gone = True

    def _send(self) -> None:
        self._number += 1
        words = [self._number, socket.gethostname(), vars(self._beat)]
        self._store.set(f"beat/{self._rank}", json.dumps(words))
        self._store.check([f"beat/{self._rank}"])  # an answer, which setting has not
        self._reached_s = time.monotonic()

    def _listen(self, is_wanted: bool) -> None:
        """Hear of all ranks if that is wanted; the time in which it was not is nobody's silence."""
        if is_wanted:
            now_s = time.monotonic()
            if not self._is_listening:
                self._roll.wake(now_s - self._read_s)
            self._read_s = now_s
            self._read()
        self._is_listening = is_wanted

    def _read(self) -> None:
        """Hear of all ranks, each of which has sent a beat before it joined the job."""
        texts = self._store.multi_get([f"beat/{rank}" for rank in range(self._num_ranks)])
        for rank, text in enumerate(texts):
            number, name, beat = json.loads(text)
            if self._heard.get(rank) != number:
                self._heard[rank], self._names[rank] = number, name
                self._roll.hear(rank, Beat(**beat))
        if self._failed is None and self._store.check(["failed"]):
            self._failed = Failed(**json.loads(self._store.get("failed")))

    # The watch.

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self._beat = PULSE.beat()
            unreached_s = time.monotonic() - self._reached_s
            if self._rank == self._host:
                self._tell(unreached_s)
            silent = self._silent_for(self._timeout_s)
            if unreached_s > self._timeout_s:
                self._end(self._unreached())
            elif silent:
                self._end(self._silent(silent))
            elif self._failed is not None and self._beat.still_s > SILENT_S:
                self._end(self._other_failed(self._failed))

    def _tell(self, unreached_s: float) -> None:
        """Tell, once, who holds this host up."""
        if self._silent_s < unreached_s < self._timeout_s and not self._is_told_unreached:
            self._is_told_unreached = True
            tell(f"{self._unreached()}; the job ends after the timeout of {self._timeout_s:g} s")
        silent = self._silent_for(self._silent_s)
        news = [rank for rank in silent if self._roll.is_news(rank)]
        if news and self._silent_s < self._timeout_s:
            tell(f"{self._silent(news)}; the job ends after the timeout of {self._timeout_s:g} s")
        elif self._is_listening and not silent and (stall := self._roll.stall()) is not None:
            tell(stall)

    def _silent_for(self, limit_s: float) -> list[int]:
        """Return who was silent for longer than a limit, of the time that this rank listened."""
        return self._roll.silent(limit_s) if self._is_listening else []

    def _end(self, message: str) -> None:
        """End this process, whatever its main thread waits for."""
        if self._last_word.acquire(blocking=False):
            if self._rank == self._host:
                print(f"rank {self._rank}: {self._advised(message)}", file=sys.stderr, flush=True)  # noqa: T201
            else:
                time.sleep(1.0)  # torchrun ends all ranks of a host when the first leaves
            os._exit(1)

    # Words.

    def _unreached(self) -> str:
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if self._is_store_gone:
            return (
                f"the job's store at {where} has gone: rank 0, or torchrun on its host, has ended"
            )
        for_s = f"for {time.monotonic() - self._reached_s:.0f} s"
        return (
            f"{socket.gethostname()} has not reached the job's store at {where} {for_s}: the host "
            "of rank 0 is lost or stopped, or the network to it is cut"
        )

    def _silent(self, ranks: list[int]) -> str:
        names = ", ".join(sorted({self._names[rank] for rank in ranks}))
        for_s = f"for {max(self._roll.silence_s(rank) for rank in ranks):.0f} s"
        return (
            f"{named(ranks)} on {names} {'have' if len(ranks) > 1 else 'has'} not been heard of "
            f"{for_s}, last in {self._roll.doing(ranks[0])}: the process or the host is lost or "
            "stopped, or the network to it is cut"
        )

    def _other_failed(self, failed: Failed) -> str:
        return f"rank {failed.rank} on {failed.name} failed first: {failed.message}"

    def _advised(self, message: str) -> str:
        """Close a message with what to do, unless the disk is lost too."""
        advice: list[str] = []
        asked = threading.Thread(target=lambda: advice.append(PULSE.advice()), daemon=True)
        asked.start()
        asked.join(WORDS_S)
        return "\n".join([message, *filter(None, advice)])

    # Errors of this rank.

    def judged(self, error: Exception, is_lost_peer: bool) -> Exception:
        """Return what this rank is to raise instead of an error of its own.

        An error that others have told is a PeerFailed; one that says no more than that a rank did
        not come or has left becomes one that says which.
        """
        if isinstance(error, PeerFailed):
            return error
        judged = self._whose(error) if is_lost_peer else self._announced(error)
        # The watch has begun to tell it, and ends this process.
        if not self._last_word.acquire(blocking=False):
            threading.Event().wait()
        return judged

    def _announced(self, error: Exception) -> Exception:
        """Tell the other ranks of an error, unless one on this host has told the same."""
        mine = Failed(self._rank, self._host, socket.gethostname(), message_of(error)[:1000])
        said = PeerFailed("another rank of this host tells it")
        with suppress(RuntimeError):  # without the store each tells its own
            for key in ("failed", f"failed/{self._host}"):
                text = self._store.compare_set(key, "", json.dumps(vars(mine))).decode()
                first = Failed(**json.loads(text))
                if first == mine or first.message != mine.message:
                    return error
                if first.host == mine.host:
                    return said
        return error

    def _whose(self, error: Exception) -> Exception:
        """Find out which rank did not come; it takes as long as it takes to be sure of silence."""
        limit_s = 2.5 * self._interval_s
        self._is_curious = True
        until_s = time.monotonic() + 2 * limit_s + 2
        message = ""
        while not message and time.monotonic() < until_s:
            time.sleep(0.25)
            silent = self._silent_for(limit_s)
            if self._failed is not None and self._failed.rank != self._rank:
                if self._failed.host == self._host:
                    return PeerFailed(self._failed.message)
                message = self._other_failed(self._failed)
            elif self._is_store_gone or time.monotonic() - self._reached_s > limit_s:
                message = self._unreached()
            elif silent:
                message = self._silent(silent)
        if not message:
            message = "\n".join(
                [f"rank {self._rank} has waited in vain; all stood", *self._roll.lines()]
            )
        if self._rank != self._host:
            return PeerFailed(message)
        judged = TrainingError(self._advised(message))
        judged.__cause__ = error if isinstance(error, PhalanxError) else None
        return judged
