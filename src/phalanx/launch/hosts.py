"""Watch a job from within each of its ranks, over the job's store: several hosts have no parent.

    messenger  beat -> store, every few seconds; reads the beats of others once this rank stands
               still: of those before it on its host, and of all if it speaks for the host
    watch      no network: tells who is silent, and ends this rank if that lasts for the timeout

The first rank of a host that is heard of speaks for it, so that a job on H hosts reads H beats for
each that is sent; the others end without a word. A beat counts as heard when its number has
changed, by the reader's own clock: the clocks of hosts differ.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from phalanx.errors import PhalanxError, TrainingError, message_of, named
from phalanx.launch.bulletin import Bulletin, Failed
from phalanx.launch.pulse import PULSE, Beat
from phalanx.launch.rank import end_helpers, remove_sockets
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.roll import SILENT_S, Roll
from phalanx.launch.supervisor import SLEPT_S, tell

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_BEAT_S: Final = 2.0
"""Seconds between two beats of a rank in a job of a few hundred ranks."""

RANKS_PER_BEAT_S: Final = 500
"""Beats that the store takes in a second, at most."""

CURIOUS_S: Final = 3.0
"""How long this rank stands still before it asks for the others, in seconds."""

WORDS_S: Final = 2.0
"""How long the disk may take to say which checkpoint stands, in seconds."""


def end_with_parent() -> None:
    """Have this rank end soon after torchrun has, which ends its ranks unless it was killed."""
    parent, is_first = os.getppid(), os.environ.get("LOCAL_RANK", "0") == "0"

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if is_first:
            gone = f"torchrun (process {parent}) has ended, and its ranks on this host end with it"
            tell(advised(gone))
        end_helpers()
        remove_sockets()
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="parent", daemon=True).start()


class PeerFailed(TrainingError):
    """Another rank tells the error; this one ends with it."""


class Watch:
    """Watches the job on one rank, as a context."""

    def __init__(self, store: Store, env: RankEnv, timeout_s: float) -> None:
        """Say that this rank is there.

        Args:
            store: of this call alone, over a connection of its own.
            env: of this rank.
            timeout_s: how long a rank or the store may be silent, in seconds.
        """
        self._rank, self._num_ranks, self._here = env.rank, env.num_ranks, env.here
        self._timeout_s = timeout_s
        self._interval_s = max(min(STORE_BEAT_S, timeout_s / 5), env.num_ranks / RANKS_PER_BEAT_S)
        # Among thousands of ranks a beat is old before it is read.
        self._silent_s = max(SILENT_S, 3 * self._interval_s)
        self._bulletin = Bulletin(store, env, timeout_s)
        self._roll = Roll()
        self._failed: Failed | None = None
        self._read_s = self._looked_s = time.monotonic()
        self._is_store_gone = False
        self._is_curious = False
        self._is_listening = False
        self._is_told_unreached = False
        self._last_word = threading.Lock()
        self._ended = threading.Event()
        self._beat = Beat()

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
                self._bulletin.send(self._beat)
                if self._bulletin.are_all_there():
                    self._listen(self._is_curious or self._beat.still_s > CURIOUS_S)
        except (dist.DistError, RuntimeError):
            self._is_store_gone = True

    def _listen(self, is_wanted: bool) -> None:
        """Hear of others if that is wanted; the time in which it was not is nobody's silence."""
        if is_wanted:
            now_s = time.monotonic()
            if not self._is_listening:
                self._roll.wake(now_s - self._read_s)
            self._read_s = now_s
            self._bulletin.read(self._listened_to(), self._roll)
            self._failed = self._failed or self._bulletin.failed()
        self._is_listening = is_wanted

    def _speaks(self) -> bool:
        """Return whether this rank speaks for its host: those before it there are not heard of."""
        limit_s = min(self._silent_s, self._timeout_s)
        silent = self._roll.silent(limit_s) if self._is_listening else ()
        return all(rank in silent for rank in range(self._here.start, self._rank))

    def _listened_to(self) -> range:
        return range(self._num_ranks) if self._speaks() else range(self._here.start, self._rank)

    # The watch.

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self._wake()
            self._beat = PULSE.beat()
            if self._speaks():
                self._tell()
            if lost := self._lost(self._timeout_s):
                self._end(lost)
            elif self._failed is not None and self._beat.still_s > SILENT_S:
                self._end(str(self._failed))

    def _wake(self) -> None:
        """Hold nobody for silent for the time in which this process was stopped itself."""
        now_s = time.monotonic()
        slept_s, self._looked_s = now_s - self._looked_s, now_s
        if slept_s > SLEPT_S:
            self._bulletin.reached_s += slept_s
            self._roll.wake(slept_s)

    def _tell(self) -> None:
        """Tell, once, who holds this host up."""
        end = f"the job ends after the timeout of {self._timeout_s:g} s"
        silent = self._silent_for(self._silent_s)
        if (
            not self._is_store_gone
            and self._silent_s < self._unreached_s() < self._timeout_s
            and not self._is_told_unreached
        ):
            self._is_told_unreached = True
            tell(f"{self._unreached()}; {end}")
        if news := [rank for rank in silent if self._roll.is_news(rank)]:
            if self._silent_s < self._timeout_s:
                tell(f"{self._silent(news)}; {end}")
        elif self._is_listening and not silent and (stall := self._roll.stall()) is not None:
            tell(stall)

    def _unreached_s(self) -> float:
        return time.monotonic() - self._bulletin.reached_s

    def _silent_for(self, limit_s: float) -> list[int]:
        """Return who was silent for longer than a limit, of the time that this rank listened."""
        listened_to = self._listened_to() if self._is_listening else ()
        return [rank for rank in self._roll.silent(limit_s) if rank in listened_to]

    def _lost(self, limit_s: float) -> str:
        """Say what has not been heard of for longer than a limit; nothing if all have."""
        # A store that has gone does not come back.
        if self._unreached_s() > (min(SILENT_S, limit_s) if self._is_store_gone else limit_s):
            return self._unreached()
        silent = self._silent_for(limit_s)
        return self._silent(silent) if silent else ""

    def _end(self, message: str) -> None:
        """End this process, whatever its main thread waits for."""
        if self._last_word.acquire(blocking=False):
            if self._speaks():
                print(f"rank {self._rank}: {advised(message)}", file=sys.stderr, flush=True)  # noqa: T201
                self._give_up_silent(self._timeout_s)
                kill_silent()
            else:
                time.sleep(1.0)  # torchrun ends all ranks of a host when the first leaves
            os._exit(1)

    def _give_up_silent(self, limit_s: float) -> None:
        """Note which processes of this host have to be killed once the job has ended."""
        if "TORCHELASTIC_RUN_ID" in os.environ:  # else they may be of another container
            silent = [rank for rank in self._silent_for(limit_s) if rank in self._here]
            _given_up.extend(self._bulletin.processes[rank] for rank in silent)

    def is_torn_down(self) -> bool:
        """Return whether torchrun ends this rank since another of its host has ended, and end it.

        Its signal is that of a user who asks the job to stop.
        """
        gone = [rank for rank, pid in self._bulletin.processes.items() if not _is_there(pid)]
        if not gone or "TORCHELASTIC_RUN_ID" not in os.environ:
            return False
        self._end(f"{named(gone)} {'have' if len(gone) > 1 else 'has'} ended, so the job ends")
        return True  # and the main thread tells why

    # Words.

    def _unreached(self) -> str:
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        store = f"the job's store at {where}"
        if self._is_store_gone:
            return f"{store} has gone: rank 0, or torchrun on its host, has ended"
        return (
            f"{socket.gethostname()} has not reached {store} for {self._unreached_s():.0f} s: the "
            "host of rank 0 is lost or stopped, or the network to it is cut"
        )

    def _silent(self, ranks: list[int]) -> str:
        names = ", ".join(sorted({self._bulletin.names[rank] for rank in ranks}))
        for_s = f"for {max(self._roll.silence_s(rank) for rank in ranks):.0f} s"
        return (
            f"{named(ranks)} on {names} {'have' if len(ranks) > 1 else 'has'} not been heard of "
            f"{for_s} (last heard of: {self._roll.doing(ranks[0])}): the process or the host is "
            "lost or stopped, or the network to it is cut"
        )

    # Errors of this rank.

    def judged(self, error: Exception, is_lost_peer: bool) -> Exception:
        """Return what this rank is to raise instead of an error of its own.

        An error that others have told is a PeerFailed; one that says no more than that a rank did
        not come or has left becomes one that says which.
        """
        if isinstance(error, PeerFailed):
            return error
        if is_lost_peer:
            judged = self._whose(error)
        elif self._bulletin.fail(message_of(error)):
            judged = PeerFailed("another rank of this host tells it")
        else:
            judged = error
        # The watch has begun to tell it, and ends this process.
        if not self._last_word.acquire(blocking=False):
            threading.Event().wait()
        return judged

    def _whose(self, error: Exception) -> Exception:
        """Find out which rank did not come; it takes as long as it takes to be sure of silence."""
        limit_s = 2.5 * self._interval_s
        self._is_curious = True
        until_s = time.monotonic() + 2 * limit_s + 2
        message = ""
        while not message and time.monotonic() < until_s:
            time.sleep(0.25)
            if self._failed is not None and self._failed.host == self._here.start:
                return PeerFailed(self._failed.message)
            message = str(self._failed or self._lost(limit_s))
        if not self._speaks():
            return PeerFailed(message)
        if not message:
            message = self._roll.told(f"rank {self._rank} has waited in vain; all stood")
        self._give_up_silent(limit_s)
        judged = TrainingError(advised(message))
        judged.__cause__ = error if isinstance(error, PhalanxError) else None
        return judged


_given_up: list[int] = []


def kill_silent() -> None:
    """Kill the processes that were given up: torchrun waits 30 s for one that is stopped."""
    for pid in _given_up:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def advised(message: str) -> str:
    """Close a message with what to do, unless it says that or the disk is lost too."""
    advice: list[str] = []
    asked = threading.Thread(target=lambda: advice.append(PULSE.advice()), daemon=True)
    asked.start()
    asked.join(WORDS_S)
    return "\n".join([message, *(text for text in advice if text and text not in message)])


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
