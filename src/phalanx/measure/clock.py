"""The clock of spans and timers, and the offset of every rank's clock to the clock of rank 0.

Clocks of hosts differ by any number of seconds, and drift by up to some 50 ppm. All ranks `compare`
theirs before and after the profiled steps, with messages over the job's store:

    rank 0   t1 -- ping -->               <-- pong with t -- t2      over and over
    rank r                  reads t

The clock of rank 0 had passed t1, and not yet reached t2, when rank r read t. So the offset
t - (clock of rank 0) is between t - t2 and t - t1, and every round narrows the interval.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.comm.waits import declared
from phalanx.storage import open_to_append

if TYPE_CHECKING:
    from phalanx.comm.comm import Comm

CLOCK: Final = "trace/clock.jsonl"
"""File of the comparisons, within the folder of a run."""

ROUNDS: Final = 16
"""Messages to each rank and back in one comparison."""

DRIFT: Final = 200e-6
"""Largest difference of two clocks' rates, of which crystals and NTP each cause up to a half."""

WANDER: Final = 5e-6
"""Largest difference between the rate of a clock and its mean rate between two comparisons."""


def now() -> float:
    """Return seconds of this process's clock, by which all spans and step ledgers are measured."""
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a rank's clock with the clock of rank 0.

    Attributes:
        rank: global rank.
        at_s: time of the comparison, by the rank's clock.
        offset_s: the rank's clock minus the clock of rank 0.
        error_s: largest error of `offset_s`.
    """

    rank: int
    at_s: float
    offset_s: float
    error_s: float


def compare(run: Path, comm: Comm) -> None:
    """Compare the clocks of all ranks, which call this together; rank 0 adds lines to CLOCK.

    Args:
        run: folder of the run.
        comm: communicator of the job.

    Raises:
        OSError: rank 0 could not write the file; all messages have been answered.
    """
    num_ranks = prod(comm.axes.values())
    comparisons = [Comparison(0, now(), 0.0, 0.0)]
    if num_ranks > 1:
        # With torch; those who read comparisons need none.
        from torch.distributed import PrefixStore

        from phalanx.comm.join import job_store, job_timeout

        store, limit = job_store(), job_timeout()
        # Each rank counts its comparisons: keys of an earlier one differ.
        store = PrefixStore(f"clock/{store.add(f'clocks/{comm.rank}', 1)}", store)
        with declared(is_limited=True):
            for number in range(ROUNDS) if comm.rank else ():
                store.wait([f"{comm.rank}/ping/{number}"], limit)
                store.set(f"{comm.rank}/pong/{number}", repr(now()))
            for rank in range(1, num_ranks) if not comm.rank else ():
                rounds: list[tuple[float, float, float]] = []
                for number in range(ROUNDS):
                    sent_s = now()
                    store.set(f"{rank}/ping/{number}", "")
                    store.wait([f"{rank}/pong/{number}"], limit)
                    received_s = now()
                    there_s = float(store.get(f"{rank}/pong/{number}"))
                    rounds.append((sent_s, there_s, received_s))
                for number in range(ROUNDS):
                    store.delete_key(f"{rank}/ping/{number}")
                    store.delete_key(f"{rank}/pong/{number}")
                comparisons.append(comparison_of(rank, rounds))
    if comm.rank == 0:
        (run / CLOCK).parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(run / CLOCK) as file:
            file.write("".join(json.dumps(asdict(each)) + "\n" for each in comparisons))


def comparison_of(rank: int, rounds: Iterable[tuple[float, float, float]]) -> Comparison:
    """Return the comparison at the last of `rounds`: (ping sent, pong's time, pong received)."""
    rounds = [*rounds]
    at_s = rounds[-1][1]
    least_s = max(there - received - DRIFT * (at_s - there) for _, there, received in rounds)
    most_s = min(there - sent + DRIFT * (at_s - there) for sent, there, _ in rounds)
    return Comparison(rank, at_s, (least_s + most_s) / 2, abs(most_s - least_s) / 2)


class Clocks:
    """The clocks of the ranks of a run, from their comparisons."""

    def __init__(self, comparisons: Iterable[Comparison]) -> None:
        """Use `comparisons` in the order in which they were made."""
        self._of_rank = defaultdict[int, list[Comparison]](list)
        for each in comparisons:
            self._of_rank[each.rank].append(each)

    def __contains__(self, rank: int) -> bool:
        return rank in self._of_rank

    def offset(self, rank: int, t_s: float) -> Comparison:
        """Return the offset of a rank's clock at its time `t_s`, with the largest error.

        Between two comparisons the clock is taken as linear. Before the first, after the last, and
        where the clock was set between two (another host has the rank since), the nearest
        comparison holds, and the error grows by DRIFT.

        Raises:
            KeyError: the run has no comparison with this rank.
        """
        if rank not in self:
            raise KeyError(rank)
        #  error    \_                      _/|       |\_
        #             \__-- WANDER --______/  |       |  \_ DRIFT
        #               first          second |       last
        for first, second in pairwise(self._of_rank[rank]):
            span_s = second.at_s - first.at_s
            jump_s = abs(second.offset_s - first.offset_s) - first.error_s - second.error_s
            if first.at_s <= t_s <= second.at_s and span_s and jump_s <= DRIFT * span_s:
                share = (t_s - first.at_s) / span_s
                offset_s = first.offset_s + share * (second.offset_s - first.offset_s)
                error_s = first.error_s + share * (second.error_s - first.error_s)
                if rank:
                    error_s += WANDER * min(t_s - first.at_s, second.at_s - t_s)
                return Comparison(rank, t_s, offset_s, error_s)
        nearest = min(self._of_rank[rank], key=lambda each: abs(each.at_s - t_s))
        grown_s = DRIFT * abs(nearest.at_s - t_s) if rank else 0.0
        return Comparison(rank, t_s, nearest.offset_s, nearest.error_s + grown_s)

    def to_rank0(self, rank: int, t_s: float) -> float:
        """Return the time of rank 0's clock at time `t_s` of a rank's clock."""
        return t_s - self.offset(rank, t_s).offset_s

    def error_s(self, rank: int, *times_s: float) -> float:
        """Return the largest error of `to_rank0` at `times_s`, or at the comparisons if none."""
        times_s = times_s or tuple(each.at_s for each in self._of_rank.get(rank, ()))
        return max(self.offset(rank, t_s).error_s for t_s in times_s)


def clocks(run: Path) -> Clocks:
    """Read the comparisons of a run; a last line that was cut off is left out.

    Raises:
        OSError: the run has no comparisons.
    """
    comparisons: list[Comparison] = []
    for line in (run / CLOCK).read_text(encoding="utf-8").splitlines():
        try:
            comparisons.append(Comparison(**json.loads(line)))
        except (ValueError, TypeError):  # the disk was full, or the run was killed
            continue
    return Clocks(comparisons)
