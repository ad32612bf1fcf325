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
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.comm.waits import declared
from phalanx.storage import open_to_append

if TYPE_CHECKING:
    from phalanx.comm.comm import Comm

Array = NDArray[Any]

CLOCK: Final = "trace/clock.jsonl"
"""File of the comparisons, within the folder of a run."""

ROUNDS: Final = 16
"""Messages to each rank and back in one comparison."""

WANDER: Final = 5e-6
"""Largest difference between the rate of a clock and its mean rate between two comparisons."""

DRIFT: Final = 200e-6
"""Largest difference of two clocks' rates, of which crystals and NTP each cause up to a half."""


def now() -> float:
    """Return seconds of this process's clock, by which all spans and step ledgers are measured."""
    return time.perf_counter()


class Comparison(NamedTuple):
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
            file.write("".join(json.dumps(each._asdict()) + "\n" for each in comparisons))


def comparison_of(rank: int, rounds: Iterable[tuple[float, float, float]]) -> Comparison:
    """Return the comparison at the last of `rounds`: (ping sent, pong's time, pong received)."""
    rounds = [*rounds]
    at_s = rounds[-1][1]
    least_s = max(there - received - DRIFT * (at_s - there) for _, there, received in rounds)
    most_s = min(there - sent + DRIFT * (at_s - there) for sent, there, _ in rounds)
    return Comparison(rank, at_s, (least_s + most_s) / 2, abs(most_s - least_s) / 2)


def offset(comparisons: Sequence[Comparison], times_s: ArrayLike) -> tuple[Array, Array]:
    """Return the offset of a rank's clock at its times, and the largest error of each.

    Between two comparisons the clock is taken as linear. Before the first, after the last, and
    where the clock was set between two (another host has the rank since), the nearest comparison
    holds, and the error grows by DRIFT.
    """
    #  error    \_                      _/|       |\_
    #             \__-- WANDER --______/  |       |  \_ DRIFT
    #               first          second |       last
    known, t_s = sorted(comparisons, key=lambda each: each.at_s), np.asarray(times_s, float)
    drift, wander = (DRIFT, WANDER) if known[0].rank else (0.0, 0.0)
    at_s, offsets_s, errors_s = np.array([each[1:] for each in known]).T
    away_s = abs(t_s[..., None] - at_s)
    nearest = away_s.argmin(-1)
    offset_s, error_s = offsets_s[nearest], errors_s[nearest] + drift * away_s.min(-1)
    for a, b in pairwise(known):
        span_s = b.at_s - a.at_s
        if 0 < span_s and abs(b.offset_s - a.offset_s) <= a.error_s + b.error_s + DRIFT * span_s:
            share, is_inside = (t_s - a.at_s) / span_s, (a.at_s <= t_s) & (t_s <= b.at_s)
            linear_s = a.offset_s + share * (b.offset_s - a.offset_s)
            grown_s = wander * span_s * np.minimum(share, 1 - share)
            offset_s = np.where(is_inside, linear_s, offset_s)
            linear_s = a.error_s + share * (b.error_s - a.error_s)
            error_s = np.where(is_inside, linear_s + grown_s, error_s)
    return offset_s, error_s


def read_comparisons(run: Path) -> dict[int, list[Comparison]]:
    """Read the comparisons of a run by rank; a line that is damaged is left out.

    Raises:
        OSError: the run has no comparisons.
    """
    of_rank = dict[int, list[Comparison]]()
    for line in (run / CLOCK).read_text("utf-8", "replace").splitlines():
        try:
            comparison = Comparison(**json.loads(line))
        except (ValueError, TypeError):  # the disk was full, or the run was killed
            continue
        of_rank.setdefault(comparison.rank, []).append(comparison)
    return of_rank
