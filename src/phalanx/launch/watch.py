"""Monitor a job from each of its ranks: on several hosts no process is the parent of all.

Each rank has two threads beside its main thread:

    messenger  writes a heartbeat to the job's store every few seconds (`feed`); once this rank has
               stalled, reads the heartbeats of earlier ranks of its host, or of all ranks if it is
               the reporter
    watch      no network: reports silent ranks, and ends this rank if the silence lasts for the
               timeout

The reporter of a host is its first rank that still sends heartbeats, so that a job on H hosts reads
H heartbeats for each one sent; the other ranks end without a message.

    main thread     moves |  stalled            moves    |  stalled, or a peer is lost
    messenger      sends  |  sends and reads    sends    |  sends and reads
    monitor.clock     -   |  ticks                -      |  ticks, by the watch thread
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from phalanx.errors import PhalanxError, TrainingError, message_of, named
from phalanx.launch.failure import PeerFailed, lost_peer_code, report, with_advice
from phalanx.launch.feed import Feed
from phalanx.launch.heartbeat import PULSE, Beat
from phalanx.launch.heartbeat_monitor import SILENT_S, SLEPT_S, HeartbeatMonitor
from phalanx.launch.lease import Leases, ListeningClock
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.rank_log import screen

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_BEAT_S: Final = 2.0
"""Interval between two heartbeats of a rank, in seconds, in a job of up to 1000 ranks."""

RANKS_PER_BEAT_S: Final = 500
"""Most heartbeats that the store receives in a second."""

STILL_BEFORE_READ_S: Final = 3.0
"""Seconds that this rank is stalled before it reads the others' heartbeats."""


@dataclass(frozen=True)
class Failed:
    """The job's first error that is not a lost peer; `host` is the first rank on that host."""

    rank: int
    host: int
    name: str
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.name} failed first: {self.message}"


class Watch:
    """Context manager that monitors the job from one rank, in two threads."""

    def __init__(self, store: Store, env: RankEnv, timeout_s: float) -> None:
        """Send the first heartbeat of this rank.

        Only this call uses the keys of `store` and its connection. A rank, or the store, may be
        silent for `timeout_s`, also before the first heartbeat of a rank.
        """
        self._rank, self._num_ranks, self._here = env.rank, env.num_ranks, env.here
        self._timeout_s = timeout_s
        self._interval_s = max(min(STORE_BEAT_S, timeout_s / 5), env.num_ranks / RANKS_PER_BEAT_S)
        self._store = store
        store.set_timeout(timedelta(seconds=timeout_s))
        # Without torchrun, the ranks of a host may be in several containers, where ids differ.
        self._knows_processes = "TORCHELASTIC_RUN_ID" in os.environ
        # With thousands of ranks a heartbeat is already old when it is read.
        silent_s = max(SILENT_S, 3 * self._interval_s)
        self._monitor = HeartbeatMonitor(
            timeout_s, env.here if self._knows_processes else (), silent_s
        )
        self._processes: dict[int, int] = {}  # of this host, once all ranks have reported
        self._failed: Failed | None = None
        clock = ListeningClock(SLEPT_S)
        self._clock = clock
        self._reached = Leases[str](lambda: clock.now_s)
        for what in ("the begin", "the store"):
            self._reached.renew(what)
        self._missing: list[int] = []
        self._is_store_gone = False
        self._is_curious = False
        self._is_listening = False
        self._has_reported_unreached = False
        self._last_word = threading.Lock()
        self._ended = threading.Event()
        self._beat = Beat()
        self._feed = Feed(store, env.rank)
        self._feed.send(self._beat)
        if store.add("ranks", 1) == env.num_ranks:
            store.set("all ranks", "")

    def __enter__(self) -> Watch:
        for work in (self._deliver, self._watch):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    # The messenger thread.

    def _deliver(self) -> None:
        import torch.distributed as dist

        try:
            while not self._ended.wait(1.0 if self._is_curious else self._interval_s):
                self._exchange_beats()
        except (dist.DistError, RuntimeError):
            self._is_store_gone = True

    def _exchange_beats(self) -> None:
        """Send a heartbeat; read the others' if needed, or find ranks that have sent none."""
        self._feed.send(self._beat)
        self._reached.renew("the store")
        if not self._processes and self._store.check(["all ranks"]):
            self._monitor.clock.tick()  # else the time until now would age these heartbeats
            self._feed.read(self._here, self._monitor)
            self._processes = {rank: self._monitor.process(rank) for rank in self._here}
        if self._processes:
            is_held_up = self._beat.waits or self._beat.seconds_at_place > STILL_BEFORE_READ_S
            self._listen(self._is_curious or is_held_up)
        elif self._reached.age_s("the begin") > self._timeout_s:
            self._missing = self._feed.missing(range(self._num_ranks))

    def _listen(self, is_wanted: bool) -> None:
        """Read other ranks' heartbeats, and the first failure, if wanted."""
        if is_wanted:
            if not self._is_listening:  # the time in which it did not listen comes before this look
                self._monitor.clock.tick()
            self._feed.read(self._listened_to(), self._monitor)
            if self._failed is None and self._store.check(["failed"]):
                self._failed = Failed(**json.loads(self._store.get("failed")))
        self._is_listening = is_wanted

    def _is_reporter(self) -> bool:
        """Return whether this rank reports for its host, because all earlier ranks are silent."""
        limit_s = min(self._monitor.silent_s, self._timeout_s)
        silent = self._monitor.silent(limit_s) if self._is_listening else self._missing
        return all(rank in silent for rank in range(self._here.start, self._rank))

    def _listened_to(self) -> range:
        return (
            range(self._num_ranks) if self._is_reporter() else range(self._here.start, self._rank)
        )

    # The watch thread.

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self._clock.tick()
            if self._is_listening:
                self._monitor.clock.tick()
            self._beat = PULSE.beat()
            if self._is_reporter():
                is_late = self._monitor.silent_s < self._unreached_s() < self._timeout_s
                if is_late and not self._is_store_gone and not self._has_reported_unreached:
                    self._has_reported_unreached = True
                    end = f"the job ends after the timeout of {self._timeout_s:g} s"
                    report(f"{self._unreached()}; {end}")
                if self._is_listening:
                    for message in self._monitor.new_reports(self._heard()):
                        report(message)
            timed_out = self._missing_message() or self._monitor.timeout_message(self._heard())
            if lost := self._lost(self._timeout_s) or timed_out:
                self._end(lost, lost_peer_code())
            elif self._failed is not None and self._beat.seconds_at_place > SILENT_S:
                self._end(str(self._failed), TrainingError.exit_code)

    def _unreached_s(self) -> float:
        return self._reached.age_s("the store")

    def _heard(self) -> range:
        """Return the ranks whose heartbeats this rank now reads, and so can find silent."""
        return self._listened_to() if self._is_listening else range(0)

    def _lost(self, limit_s: float) -> str:
        """Return a message if the store has not responded for longer than a limit, else ""."""
        # A store that has closed the connection does not return.
        is_lost = self._unreached_s() > (min(SILENT_S, limit_s) if self._is_store_gone else limit_s)
        return self._unreached() if is_lost else ""

    def _end(self, message: str, exit_code: int) -> None:
        """End this process even if its main thread is blocked; the reporter prints `message`."""
        if self._last_word.acquire(blocking=False):
            if self._is_reporter():
                print(f"rank {self._rank}: {with_advice(message)}", file=screen(), flush=True)
                self._give_up_silent(self._timeout_s)
                kill_silent()
            else:
                time.sleep(1.0)  # torchrun ends all ranks of a host when the first leaves
            os._exit(exit_code)

    def _give_up_silent(self, limit_s: float) -> None:
        """Record the silent processes of this host, which `kill_silent` kills when the job ends."""
        if self._knows_processes:
            silent = [r for r in self._monitor.silent(limit_s, self._heard()) if r in self._here]
            _given_up.extend(self._processes[rank] for rank in silent)

    def is_torn_down(self) -> bool:
        """Return whether another rank of this host has ended; then end this rank too.

        torchrun then sends this rank the same signal as a user who wants the job to stop.
        """
        gone: list[int] = []
        for rank, process in self._processes.items():
            with suppress(PermissionError):
                try:
                    os.kill(process, 0)
                except ProcessLookupError:
                    gone.append(rank)
        if not gone or not self._knows_processes:
            return False
        have = "have" if len(gone) > 1 else "has"
        self._end(f"{named(gone)} {have} ended, so the job ends", lost_peer_code())
        return True  # reached only if the main thread already reports the error

    # Messages.

    def _missing_message(self) -> str:
        """Return a message if ranks have sent no heartbeat in the whole timeout, else ""."""
        if not self._missing:
            return ""
        return (
            f"{named(self._missing)} {'have' if len(self._missing) > 1 else 'has'} sent no "
            "heartbeat: the process has not started, has ended or hangs; the timeout of "
            f"{self._timeout_s:g} s is over"
        )

    def _unreached(self) -> str:
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        store = f"the job's store at {where}"
        if self._is_store_gone:
            return f"{store} has gone: rank 0, or torchrun on its host, has ended"
        return (
            f"{socket.gethostname()} has not reached {store} for {self._unreached_s():.0f} s: the "
            "host of rank 0 is lost or stopped, or the network to it is cut"
        )

    # Errors of this rank.

    def error_to_raise(self, error: Exception, is_lost_peer: bool) -> Exception:
        """Return the error that this rank raises instead of `error`.

        This is a PeerFailed if another rank of this host reported the same error. For a lost peer,
        it is an error that names the lost rank or the first failure.
        """
        if isinstance(error, PeerFailed):
            return error
        if is_lost_peer:
            judged = self._whose(error)
        elif self._fail(message_of(error)):
            judged = PeerFailed("another rank of this host reports the error")
        else:
            judged = error
        # The watch thread already reports it, and will end this process.
        if not self._last_word.acquire(blocking=False):
            threading.Event().wait()
        return judged

    def _fail(self, message: str) -> bool:
        """Report this rank's error; return whether another rank of this host reported the same."""
        mine = Failed(self._rank, self._here.start, socket.gethostname(), message[:1000])
        with suppress(RuntimeError):  # without the store each rank prints its own error
            # The first error of the job, then of this host: ranks that fail alike report it once a
            # host.
            for key in ("failed", f"failed/{mine.host}"):
                text = self._store.compare_set(key, "", json.dumps(vars(mine))).decode()
                first = Failed(**json.loads(text))
                if first == mine or first.message != mine.message:
                    return False
                if first.host == mine.host:
                    return True
        return False

    def _whose(self, error: Exception) -> Exception:
        """Return an error that names the lost rank, after waiting long enough to detect silence."""
        # A rank sees only that its collective failed. Whose fault it is takes a while to show:
        #
        #     0 s           the collective raises: the peer has gone, or its network
        #     0.25 s ...    another rank of this host reports its error: this one is quiet
        #     2.5 beats     a rank is silent: it is the lost one
        #     5 beats + 2   nobody is: this rank has waited in vain, for a reason unknown
        limit_s = 2.5 * self._interval_s
        self._is_curious = True
        until_s = time.monotonic() + 2 * limit_s + 2
        message = ""
        while not message and time.monotonic() < until_s:
            time.sleep(0.25)
            if self._failed is not None and self._failed.host == self._here.start:
                return PeerFailed(self._failed.message)
            silent = self._monitor.silent(limit_s, self._heard())
            message = str(self._failed or self._lost(limit_s))
            if silent and not message:
                message = self._monitor.in_vain(self._rank, silent)
        judged = PeerFailed(message)
        if self._is_reporter():
            self._give_up_silent(limit_s)
            message = message or self._monitor.in_vain(self._rank, ())
            judged = TrainingError(with_advice(message))
            judged.__cause__ = error if isinstance(error, PhalanxError) else None
        if self._failed is None:
            judged.exit_code = lost_peer_code()
        return judged


_given_up: list[int] = []


def kill_silent() -> None:
    """Kill the recorded silent processes, because torchrun waits 30 s for a stopped process."""
    for pid in _given_up:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
