"""The latest heartbeat of each rank of a job, and the reports that follow from the heartbeats.

The parent of local ranks reads them from the job's store (`feed`), and so does a rank of each host
under torchrun (`watch`). For both, the monitor reports in the same words which ranks are silent or
stopped, which ranks delay the others and which rank waited in vain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from phalanx.errors import named
from phalanx.launch.heartbeat import Beat
from phalanx.launch.lease import Leases, ListeningClock

STILL_S: Final = 20.0
"""Longest time that a rank's main thread may stay at one place before a report, in seconds."""

SILENT_S: Final = 10.0
"""Longest time without a heartbeat before a report, in seconds; one arrives every 1 or 2 s."""

STOPPED_S: Final = 2.0
"""Shortest stop of a process that is reported, in seconds; Ctrl-Z and `fg` stop all briefly."""

UNEVEN_S: Final = 15.0
"""Longest time, in seconds, that all other ranks may stay in a collective after a rank returned."""

SLEPT_S: Final = 5.0
"""Most seconds that count between two looks of a reader: for longer, the reader was stopped."""

PATIENCE: Final = 5
"""Factor on the time that a rank may be stalled, while no rank takes steps."""

NUM_SHOWN: Final = 4
"""Most groups of ranks that a message describes."""


def is_stopped(process: int | None) -> bool:
    """Return whether a signal has stopped a process; False off Linux."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{process}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"
    return False


class HeartbeatMonitor:
    """The latest heartbeat of each rank, and the time at which it arrived.

    Attributes:
        clock: ticked by the reader while it reads; silence is measured by this clock.
        silent_s: longest time without a heartbeat of a rank before a report, in seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        here: Container[int] = (),
        silent_s: float = SILENT_S,
        names: Sequence[str] = (),
        clock: ListeningClock | None = None,
    ) -> None:
        """Start without heartbeats; `here` are the ranks whose processes this host can inspect.

        `names` has what messages call each rank; empty: "rank N".
        """
        self.silent_s = silent_s
        self.clock = clock or ListeningClock(SLEPT_S)
        self._leases = Leases[int](lambda: self.clock.now_s)
        self._names = names
        self._timeout_s = timeout_s
        self._here = here
        self._beats: dict[int, Beat] = {}
        self._returned: set[int] = set()
        self._limit_s = STILL_S
        self._is_reported = False
        self._reported_silent: set[int] = set()
        self._stopped_since_s: dict[int, float] = {}

    # Input from the ranks.

    def start(self, rank: int, process: int | None) -> None:
        """Begin the lease of a rank with its process: it may be stopped before its first beat."""
        former = self._beats.get(rank, Beat())  # of a process that this one replaces
        beat = Beat(process=process or 0, handles_stop=former.handles_stop, on_stop=former.on_stop)
        self.record(rank, beat)

    def record(self, rank: int, beat: Beat) -> None:
        """Store a heartbeat of a rank."""
        self._beats[rank] = beat
        self._leases.renew(rank)
        self._reported_silent.discard(rank)

    def leave(self, rank: int) -> None:
        """Record that a rank has returned."""
        self._beats.pop(rank, None)
        self._leases.forget(rank)
        self._returned.add(rank)

    def has_begun(self, num_ranks: int) -> bool:
        """Return whether all ranks have started their work."""
        return sum(beat.doing != "starting" for beat in self._beats.values()) == num_ranks

    def handles_stop(self) -> bool:
        """Return whether every rank will end by itself on a request to stop."""
        return bool(self._beats) and all(beat.handles_stop for beat in self._beats.values())

    def on_stop(self) -> str:
        """Return the clause of the first rank that says how the ranks end on such a request."""
        return self._beats[min(self._beats)].on_stop

    def resume_hint(self) -> str:
        """Return the last checkpoint and how to resume from it, or "" if no rank reported them."""
        return next((beat.resume_hint for beat in self._beats.values() if beat.resume_hint), "")

    def process(self, rank: int) -> int:
        """Return the process id of a rank that has sent a heartbeat."""
        return self._beats[rank].process

    def log(self, rank: int) -> str:
        """Return the path of the log file of a rank, or "" if it has none."""
        return self._beats[rank].log if rank in self._beats else ""

    # Silent and stopped ranks.

    def silent(self, limit_s: float, among: Container[int] | None = None) -> list[int]:
        """Return the ranks, of `among` or of all, without a heartbeat for longer than a limit."""
        return self._leases.older(limit_s, among)

    def is_stopped(self, rank: int) -> bool:
        """Return whether a signal has stopped a rank; False if not `here`, or off Linux."""
        is_here = rank in self._here and rank in self._beats
        return is_here and is_stopped(self._beats[rank].process)

    def new_reports(self, among: Container[int]) -> list[str]:
        """Return new reports on ranks of `among` that delay the job, each report only once."""
        end = f"the job ends after the timeout of {self._timeout_s:g} s"
        reports: list[str] = []
        # Which report a rank gets, the first that holds:
        #
        #     stopped    its process is in state T for STOPPED_S       named, with `kill -CONT`
        #     silent     no heartbeat for `silent_s`                   named, with the timeout
        #     stalled    none is stopped or silent, but ranks stand    where each stands; the next
        #                at one place for the limit                    report takes twice as long
        now_s = self.clock.now_s
        for rank in list(self._beats):
            if rank not in among or not self.is_stopped(rank):
                self._stopped_since_s.pop(rank, None)
            else:
                self._stopped_since_s.setdefault(rank, now_s)
        since_s = sorted(self._stopped_since_s.items())
        stopped = [rank for rank, at_s in since_s if now_s - at_s >= STOPPED_S]
        silent = self.silent(self.silent_s, among) if self.silent_s < self._timeout_s else []
        for rank in filter(self._is_news, stopped):
            process = self._beats[rank].process
            reports.append(f"{self.why([rank])}; {end}, and `kill -CONT {process}` continues it")
        if new := list(filter(self._is_news, silent)):
            reports.append(f"{self.why(new)}; {end}")
        if not stopped and not silent and (stall := self.stall()) is not None:
            reports.append(stall)
        return reports

    def timeout_message(self, among: Container[int]) -> str:
        """Return a message if ranks of `among` were silent for the whole timeout, else ""."""
        silent = self.silent(self._timeout_s, among)
        return f"{self.why(silent)}; the timeout of {self._timeout_s:g} s is over" if silent else ""

    def why(self, ranks: Sequence[int]) -> str:
        """Return a sentence about ranks that send no heartbeats."""
        beats = [self._beats[rank] for rank in ranks]
        hosts = ", ".join(sorted({beat.host for beat in beats}))
        who = f"{self._named(ranks)} on {hosts}"
        if len(ranks) == 1:
            who += f" (process {beats[0].process})"
        is_stopped = all(map(self.is_stopped, ranks))
        how = "been stopped by a signal" if is_stopped else "sent no heartbeat"
        for_s = max(map(self._leases.age_s, ranks))
        sentence = f"{who} {'have' if len(ranks) > 1 else 'has'} {how} for {for_s:.0f} s"
        sentence += f" (last heartbeat: {beats[0].doing})"
        if not is_stopped and not all(rank in self._here for rank in ranks):
            sentence += ": the process or the host is lost or stopped, or the network to it is cut"
        return sentence

    def _named(self, ranks: Sequence[int]) -> str:
        return named(ranks, self._names)

    def _is_news(self, rank: int) -> bool:
        """Return whether this is the first call for a rank since its latest heartbeat."""
        is_news = rank not in self._reported_silent
        self._reported_silent.add(rank)
        return is_news

    # Ranks that wait for others.

    def early_return_message(self, going: Sequence[int]) -> str:
        """Return a message if all running ranks wait in a collective and others returned, else "".

        While a rank works outside a collective, for example to write a file, there is no limit.
        """
        beats = [self._beats[rank] for rank in going if rank in self._beats]
        waiting = [
            beat for beat in beats if beat.in_collective and beat.seconds_at_place >= UNEVEN_S
        ]
        if not self._returned or not going or len(waiting) < len(going):
            return ""
        returned = self._named(sorted(self._returned))
        return self.described(
            f"{returned} returned, so the collectives in which the other "
            "ranks wait cannot complete; each rank must make the same calls:"
        )

    def in_vain(self, rank: int, silent: Sequence[int]) -> str:
        """Return a message that `rank` waited in vain, for `silent` or returned ranks if any."""
        waited = f"{self._named([rank])} has waited in vain for another rank"
        if silent:
            return f"{self.why(silent)}; {waited}"
        if self._returned:
            waited = f"{self._named(sorted(self._returned))} returned, and {waited}"
        return self.described(f"{waited}; all ranks were at:")

    def stall(self) -> str | None:
        """Return a report if ranks are stalled, once for each such period, else None."""
        beats = dict(sorted(self._beats.items()))
        still_s = {rank: beat.seconds_at_place for rank, beat in beats.items() if not beat.waits}
        longest_s = max(still_s.values(), default=0.0)
        if longest_s < STILL_S:
            self._is_reported = False
        # Before and after the steps one rank may work for a long time while the others wait.
        is_stepping = any(beat.is_stepping for beat in beats.values())
        limit_s = self._limit_s * (1 if is_stepping else PATIENCE)
        if longest_s < limit_s or self._is_reported or len(beats) < 2:
            return None
        still = [rank for rank in still_s if still_s[rank] >= limit_s]
        # A job that stood still this long and then continued is slow: the next limit is higher.
        self._is_reported, self._limit_s = True, 2 * longest_s
        places = self.described(
            f"{self._named(still)} at the same place in the code for {longest_s:.0f} s:"
        )
        return (
            f"{places}\nUnless this is expected to be slow, end the job; phalanx train and verify "
            "--debug-comm, and phalanx.init(debug_comm=True), compare the calls of the ranks"
        )

    def described(self, heading: str) -> str:
        """Return a heading and, for each group of ranks at the same place, one or two lines."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, beat in sorted(self._beats.items()):
            groups[beat.doing, beat.place].append(rank)
        lines = [heading]
        for (doing, place), ranks in list(groups.items())[:NUM_SHOWN]:
            still_s = min(self._beats[rank].seconds_at_place for rank in ranks)
            lines.append(f"  {self._named(ranks)}: {doing}")
            if place:
                lines.append(f"    for {still_s:.0f} s at {place}")
        if len(groups) > NUM_SHOWN:
            lines.append(f"  and {len(groups) - NUM_SHOWN} more groups of ranks at other places")
        return "\n".join(lines)
