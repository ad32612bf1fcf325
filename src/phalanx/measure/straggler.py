"""Name what holds up the ranks of a run: a rank, a stage, a host, or the link of a mesh axis.

A rank that is late makes the others wait, so their waits say nothing of the cause; its own work
does. A rank is accused of a term if its work exceeds its peers' (rank_times) in one of three ways:

    step             1    2    3    4    5    6
    in all steps    r1   r1   r1   r1   r1   r1      the same rank, by much the same time
    another each    r0   r2   r1   r3   r0   r1      by much the same time
    in few steps     -    -   r1    -    -   r1      far more than in all other steps

Ranks that share cores differ from step to step too, but not by the same time; so what most steps
have in common counts, and not the mean. A link is accused if even the rank that comes last to a
collective waits long, and far longer for each call and byte than over other links.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from phalanx.measure.rank_times import WORK, RankWindow, groups_of, stages_of
from phalanx.report.units import percent

WARMUP_STEPS: Final = 3
"""First steps of a run, which no rank is judged by."""

LEAST_STEPS: Final = 8
"""Fewest steps by which a rank is judged."""

LEAST_S: Final = 5e-3
"""Least seconds of a step that an accusation needs."""

LEAST_SHARE: Final = {
    "all": 0.1,
    "other": 0.25,
    "work": 0.2,
    "each": 0.25,
    "few": 1.0,
    "link": 0.15,
}
"""Least excess relative to a step: in all steps for one term, between steps (where rank 0 writes
the records) and for all work together; on another rank each step; in few steps; and of a link."""

REGULAR: Final = 0.5
"""In 4 of 5 steps the excess of a cause is at least this part of its median."""

FEW: Final = 4
"""Fewest steps of the pattern "in few steps"; each exceeds the typical step by this factor too."""

SLOW_LINK: Final = 4.0
"""Time of a call over a slow link, relative to other links; of a byte, at least the half."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The cause for which the ranks of a run wait.

    Attributes:
        ranks: the ranks that are late; of a link, those that it joins.
        whole: "rank", "ranks", or what they are all ranks of: "stage N", "host NAME" or "link".
        hosts: hosts of `ranks`, each once.
        term: term that takes longer, or "communication over AXIS".
        excess_s: seconds of a step by which it exceeds that of the peers.
        share: part of the time of all steps that the others waited for it.
        pattern: "in all steps", "another each step" or "in few steps".
        steps: number of the late steps, and of all that are judged.
    """

    ranks: tuple[int, ...]
    whole: str
    hosts: tuple[str, ...]
    term: str
    excess_s: float
    share: float
    pattern: str
    steps: tuple[int, int]

    def text(self) -> str:
        """Return a sentence with ranks, host, term, share and pattern."""
        who = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {_listed(self.ranks)}"
        if self.whole not in ("rank", "ranks", "link"):
            who = f"{self.whole} ({who})"
        host = "" if self.whole.startswith("host") else f" on {', '.join(self.hosts)}"
        time = f"{1e3 * self.excess_s:,.1f} ms"
        if self.whole == "link":
            return (
                f"A slow link: {self.term}, of {who}{host}, takes {time} of a step "
                f"({percent(self.share)}) in which none of them is late, {self.pattern}."
            )
        if self.pattern == "another each step":
            return (
                f"Another rank is late each step (of {who}{host}): its {self.term} takes {time} "
                f"longer than its peers', for which they wait {percent(self.share)} of the time."
            )
        times = f" ({self.steps[0]} of {self.steps[1]})" if self.pattern == "in few steps" else ""
        who = who[0].upper() + who[1:]
        return (
            f"{who}{host} {'is' if len(self.ranks) == 1 else 'are'} late {self.pattern}{times}: "
            f"{self.term} takes {time} longer than its peers', for which they wait "
            f"{percent(self.share)} of the time."
        )


def window_from(record: Mapping[str, Any]) -> RankWindow:
    """Return the window of a record `ranks`, as read from JSON."""
    names = RankWindow.__dataclass_fields__
    return RankWindow(**{name: value for name, value in record.items() if name in names})


def accuse(windows: Sequence[RankWindow]) -> Straggler | None:
    """Return what the ranks wait for, the largest cause if there are several; None if nothing."""
    if not windows:
        return None
    judged = _Judged(windows)
    if len(judged.wall_s) < LEAST_STEPS:
        return None
    causes = [*judged.slow_links(), *judged.slow_ranks()]
    return max(causes, key=lambda cause: cause.share, default=None)


class _Judged:
    """The steps of all windows after the warm-up, as arrays."""

    def __init__(self, windows: Sequence[RankWindow]) -> None:
        self.windows, self.last = windows, windows[-1]
        medians = [median for window in windows for _, median, _ in window.spread["wall"]]
        self.wall_s = np.array(medians[WARMUP_STEPS:])
        self.step_s = statistics.median(self.wall_s.tolist() or [0.0])
        # Term -> rank of each step, and its excess in seconds.
        self.late: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for term in (*WORK, "work"):
            pairs = [pair for window in windows for pair in window.excess.get(term, ())]
            ranks, seconds = (
                zip(*pairs[WARMUP_STEPS:], strict=True) if pairs[WARMUP_STEPS:] else ((), ())
            )
            self.late[term] = np.array(ranks, dtype=int), np.array(seconds)

    def slow_ranks(self) -> Iterator[Straggler]:
        """Yield a cause for each term that makes ranks late."""
        for term, (ranks, seconds) in self.late.items():
            if not len(ranks):
                continue
            for members, whole in self._groups():
                is_theirs = np.isin(ranks, members)
                own = np.where(is_theirs, seconds, 0.0)
                least = LEAST_SHARE.get(term, LEAST_SHARE["all"])
                if self._is_regular(own, least) and self._are_all_late(members, term, ranks):
                    yield self._cause(members, whole, term, own, "in all steps")
                    break
            else:
                if self._is_regular(seconds, LEAST_SHARE["each"]) and term != "work":
                    yield self._cause(
                        sorted({*ranks.tolist()}), "ranks", term, seconds, "another each step"
                    )
                elif term != "work":
                    yield from self._late_in_few(term, ranks, seconds)

    def _groups(self) -> Iterator[tuple[list[int], str]]:
        """Yield ranks that may be late together: each alone, each stage, each of several hosts."""
        hosts = self.last.hosts
        yield from (([rank], "rank") for rank in range(len(hosts)))
        if len(stages := stages_of(self.last.axes)) > 1:
            yield from ((ranks, f"stage {stage}") for stage, ranks in enumerate(stages))
        if len(names := dict.fromkeys(hosts)) > 1:
            for name in names:
                yield [rank for rank, host in enumerate(hosts) if host == name], f"host {name}"

    def _is_regular(self, seconds: np.ndarray, least_share: float) -> bool:
        typical = float(np.median(seconds))
        is_much = typical >= max(LEAST_S, least_share * self.step_s)
        return is_much and float(np.quantile(seconds, 0.2)) >= REGULAR * typical

    def _are_all_late(self, members: Sequence[int], term: str, ranks: np.ndarray) -> bool:
        """Return whether each of `members` is the latest now and then, so that none stands out."""
        del term
        counts = Counter(ranks.tolist())
        return all(counts[rank] >= 0.1 * len(ranks) for rank in members)

    def _late_in_few(
        self, term: str, ranks: np.ndarray, seconds: np.ndarray
    ) -> Iterator[Straggler]:
        """Yield a cause if the steps with by far the most time are of one rank."""
        least = max(LEAST_S, LEAST_SHARE["few"] * self.step_s, FEW * float(np.median(seconds)))
        is_late = seconds >= least
        latest = Counter(ranks[is_late].tolist()).most_common(1)
        if latest and latest[0][1] >= max(FEW, 0.8 * is_late.sum()) and is_late.mean() < 0.5:
            own = np.where(is_late & (ranks == latest[0][0]), seconds, 0.0)
            yield self._cause([latest[0][0]], "rank", term, own, "in few steps")

    def _cause(
        self, ranks: Sequence[int], whole: str, term: str, seconds: np.ndarray, pattern: str
    ) -> Straggler:
        late = seconds[seconds > 0]
        if term == "work":  # of all terms, the one in which they exceed their peers the most
            means = {
                each: np.where(np.isin(of[0], ranks), of[1], 0.0).mean()
                for each, of in self.late.items()
                if each != "work"
            }
            term = max(means, key=lambda each: means[each])
        return Straggler(
            ranks=tuple(ranks),
            whole=whole,
            hosts=tuple(dict.fromkeys(self.last.hosts[rank] for rank in ranks)),
            term=term,
            excess_s=float(np.median(late)),
            share=float(min(1.0, seconds.sum() / self.wall_s.sum())),
            pattern=pattern,
            steps=(len(late), len(seconds)),
        )

    def slow_links(self) -> Iterator[Straggler]:
        """Yield a cause for each group of an axis whose link takes far longer than others."""
        axes, sent = self.last.axes, self.last.sent
        counted = [window for window in self.windows if window.sent] or [self.last]
        lasting_s = {
            axis: [
                self._typical(counted, axis, group) for group in range(len(groups_of(axes, axis)))
            ]
            for axis in self.last.least_exposed
            if axis in sent
        }
        for axis, groups in lasting_s.items():
            calls, num_bytes = sent[axis]
            for ranks, seconds in zip(groups_of(axes, axis), groups, strict=True):
                if seconds < max(LEAST_S, LEAST_SHARE["link"] * self.step_s):
                    continue
                others = [
                    of / sent[name][0]
                    for name, each in lasting_s.items()
                    if name != axis
                    for of in each
                ]
                bytes_s = [
                    of / sent[name][1]
                    for name, each in lasting_s.items()
                    if name != axis
                    for of in each
                ]
                siblings = [of for of in groups if of < seconds]
                is_alone = (
                    siblings
                    and seconds >= SLOW_LINK * max(siblings)
                    and len(groups) - len(siblings) == 1
                )
                is_slow = (
                    others
                    and seconds / calls >= SLOW_LINK * max(others)
                    and seconds / num_bytes >= SLOW_LINK / 2 * max(bytes_s)
                )
                if is_alone or is_slow:
                    members = (
                        ranks
                        if is_alone
                        else sorted(rank for group in groups_of(axes, axis) for rank in group)
                    )
                    yield Straggler(
                        ranks=tuple(members),
                        whole="link",
                        hosts=tuple(dict.fromkeys(self.last.hosts[rank] for rank in members)),
                        term=f"communication over {axis}",
                        excess_s=seconds,
                        share=min(1.0, seconds / self.step_s),
                        pattern="in all steps",
                        steps=(len(self.wall_s), len(self.wall_s)),
                    )

    def _typical(self, windows: Sequence[RankWindow], axis: str, group: int) -> float:
        """Return the median over the windows, each counted once for each of its steps."""
        values = [
            w.least_exposed[axis][group]
            for w in windows
            for _ in w.steps
            if axis in w.least_exposed
        ]
        return statistics.median(values) if values else 0.0


def _listed(ranks: Sequence[int]) -> str:
    """Return the numbers as text: "2", "0 and 1", "0 to 3", "0, 2 and 5"."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last
