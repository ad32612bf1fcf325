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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from phalanx.measure.rank_times import WARMUP_STEPS, RankWindow, groups_of, stages_of
from phalanx.report.units import percent

Array = NDArray[np.float64]

LEAST_STEPS: Final = 8
"""Fewest steps by which a rank is judged."""

LEAST_S: Final = 5e-3
"""Least seconds of a step that an accusation needs."""

LEAST_SHARE: Final = {
    "all": 0.1,
    "other": 0.4,
    "work": 0.2,
    "each": 0.25,
    "either": 0.5,
    "few": 1.0,
    "link": 0.15,
}
"""Least excess relative to a step: in all steps for one term, between steps (where rank 0 writes
the records) and for all work together; on another rank each step, also of two, where no majority
names the late one; in few steps; and of a link."""

REGULAR: Final = 0.5
"""In most steps the excess of a cause is at least this part of its median."""

MOST: Final = {True: 0.9, False: 0.8}
"""Part of the steps that are most; the first of two peers, which differ by chance more often."""

FEW: Final = 4
"""Fewest steps of the pattern "in few steps"; each exceeds the typical step by this factor too."""

SLOW_LINK: Final = 4.0
"""Least time of a call over a slow link, relative to other links."""

SLOW_BYTE: Final = 1.5
"""Least time of a byte over a slow link, relative to other links."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The cause for which the ranks of a run wait.

    Attributes:
        ranks: the ranks that are late; of a link, those that it joins.
        who: name of the rank, stage, host or link, with ranks and hosts.
        term: term that takes longer, or "communication over AXIS".
        excess_s: seconds of a step by which it exceeds the peers.
        share: part of the time of all steps that the others waited for it.
        when: "in all steps", "each step" (another rank in each) or "in few steps (4 of 50)"; empty
            for a link.
    """

    ranks: Sequence[int]
    who: str
    term: str
    excess_s: float
    share: float
    when: str = ""

    def text(self) -> str:
        """Return a sentence with ranks, host, term, share and pattern."""
        took, share = f"{1e3 * self.excess_s:,.1f} ms", percent(self.share)
        if not self.when:
            return (
                f"A slow link between {self.who}: {self.term} takes {took} of each step ({share}), "
                "though no rank is late for it."
            )
        return (
            f"{self.who[0].upper()}{self.who[1:]} is late {self.when}: {self.term} takes {took} "
            f"longer than on its peers, which wait for it {share} of the time."
        )


def window_from(record: Mapping[str, Any]) -> RankWindow:
    """Return the window of a record `ranks`, as read from JSON."""
    names = RankWindow.__dataclass_fields__
    return RankWindow(**{name: value for name, value in record.items() if name in names})


def accuse(windows: Sequence[RankWindow]) -> Straggler | None:
    """Return what the ranks wait for, the largest cause if there are several; None if nothing."""
    if sum(len(window.steps) for window in windows) < LEAST_STEPS + WARMUP_STEPS:
        return None
    judged = _Judged(windows)
    causes = [*judged.slow_links(), *judged.slow_ranks()]
    return max(causes, key=lambda cause: cause.share, default=None)


class _Judged:
    """The steps of all windows after the warm-up, as arrays."""

    def __init__(self, windows: Sequence[RankWindow]) -> None:
        self.windows, self.last = windows, windows[-1]
        self.stages = stages_of(self.last.axes)
        walls = [median for window in windows for _, median, _ in window.spread["wall"]]
        self.wall_s = np.array(walls[WARMUP_STEPS:])
        self.step_s = float(np.median(self.wall_s))
        # See `RankWindow.excess`: arrays [(latest rank, seconds, seconds above the next), step].
        self.late = {
            term: np.array([of for w in windows for of in w.excess[term]][WARMUP_STEPS:]).T
            for term in self.last.excess
            if all(term in window.excess for window in windows)
        }

    def slow_ranks(self) -> Iterator[Straggler]:
        """Yield a cause for each term that makes ranks late."""
        for term, (latest, seconds, gaps_s) in self.late.items():
            is_stage = term.startswith("stage")
            for members, who, ranks in self._stages() if is_stage else self._groups():
                theirs_s = np.where(np.isin(latest, members), seconds, 0.0)
                # Each of them is the latest now and then, or else one alone is the cause.
                if self._is_regular(theirs_s, term) and all(
                    (latest == rank).mean() >= 0.1 for rank in members
                ):
                    yield self._cause(ranks, who, term, theirs_s, "in all steps")
                    break
            else:
                if term == "work" or is_stage:
                    continue
                # Of many ranks that share cores, another is always nearly as late.
                if self._is_regular(gaps_s, "either" if len(self.stages[0]) == 2 else "each"):
                    ranks = sorted({*map(int, latest)})
                    who = f"another of {self._named(ranks)}"
                    yield self._cause(ranks, who, term, seconds, "each step")
                    continue
                least_s = max(LEAST_SHARE["few"] * self.step_s, FEW * float(np.median(seconds)))
                is_late = seconds >= max(LEAST_S, least_s)
                (rank, number), *_ = Counter(map(int, latest[is_late])).most_common(1) or [(0, 0)]
                if number >= max(FEW, 0.8 * is_late.sum()) and is_late.mean() < 0.5:
                    theirs_s = np.where(is_late & (latest == rank), seconds, 0.0)
                    when = f"in few steps ({number} of {len(seconds)})"
                    yield self._cause([rank], self._named([rank]), term, theirs_s, when)

    def _groups(self) -> Iterator[tuple[list[int], str, list[int]]]:
        """Yield ranks that may be late together, with their name: a rank, or all of a host."""
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(self.last.hosts):
            by_host.setdefault(host, []).append(rank)
            yield [rank], self._named([rank]), [rank]
        if len(by_host) > 1:
            for host, ranks in by_host.items():
                yield ranks, f"host {host} ({_listed(ranks)})", ranks

    def _stages(self) -> Iterator[tuple[list[int], str, list[int]]]:
        """Yield the rank that stands for each stage, the name of the stage, and all its ranks."""
        for stage, ranks in enumerate(self.stages):
            yield ranks[:1], f"stage {stage} ({self._named(ranks)})", ranks

    def _is_regular(self, seconds: Array, of: str) -> bool:
        """Return whether the excess is large, and much the same in most steps."""
        level, _, name = of.rpartition(" ")
        typical, least = float(np.median(seconds)), LEAST_SHARE.get(name, LEAST_SHARE["all"])
        is_much = typical >= max(LEAST_S, least * self.step_s)
        few = 1 - MOST[len(self.stages[0]) == 2 and not level]
        return is_much and float(np.quantile(seconds, few)) >= REGULAR * typical

    def _cause(
        self, ranks: Sequence[int], who: str, term: str, seconds: Array, when: str
    ) -> Straggler:
        level, _, name = term.rpartition(" ")
        if name == "work":  # named by the term in which these ranks exceed their peers the most
            terms = {
                each.rpartition(" ")[2]: np.where(np.isin(latest, ranks), theirs_s, 0.0).sum()
                for each, (latest, theirs_s, _) in self.late.items()
                if each.rpartition(" ")[0] == level and each != term
            }
            name = max(terms, key=lambda each: terms[each])
        return Straggler(
            ranks=tuple(ranks),
            who=who,
            term=name,
            excess_s=float(np.median(seconds[seconds > 0])),
            share=min(1.0, float(seconds.sum() / self.wall_s.sum())),
            when=when,
        )

    def slow_links(self) -> Iterator[Straggler]:
        """Yield a cause for each axis, or one group of it, whose link takes longer than others."""
        sent, waits_s = self.last.sent, dict[str, list[float]]()
        for axis in self.last.least_exposed:
            if sent.get(axis, (0, 0.0))[1] > 0:  # each window counts once for each of its steps
                having = [w for w in self.windows for _ in w.steps if axis in w.least_exposed]
                of = [w.least_exposed[axis] for w in having]
                waits_s[axis] = np.median(of[WARMUP_STEPS:] or of, 0).tolist()
        for axis, groups_s in waits_s.items():
            calls, num_bytes = sent[axis]
            others = [(max(of), *sent[name]) for name, of in waits_s.items() if name != axis]
            is_slow = bool(others) and all(
                min(groups_s) / calls >= SLOW_LINK * of_s / of_calls
                and min(groups_s) / num_bytes >= SLOW_BYTE * of_s / of_bytes
                for of_s, of_calls, of_bytes in others
            )
            groups = groups_of(self.last.axes, axis)
            most_s, slowest = max(zip(groups_s, groups, strict=True))
            is_alone = len(groups) > 1 and most_s >= SLOW_LINK * sorted(groups_s)[-2]
            least_s = max(LEAST_S, LEAST_SHARE["link"] * self.step_s)
            if most_s >= least_s and (is_slow or is_alone):
                ranks = slowest if is_alone else sorted(rank for group in groups for rank in group)
                yield Straggler(
                    ranks=tuple(ranks),
                    who=self._named(ranks),
                    term=f"communication over {axis}",
                    excess_s=most_s,
                    share=min(1.0, most_s / self.step_s),
                )

    def _named(self, ranks: Sequence[int]) -> str:
        hosts = dict.fromkeys(self.last.hosts[rank] for rank in ranks)
        return f"{_listed(ranks)} on host {' and '.join(hosts)}"


def _listed(ranks: Sequence[int]) -> str:
    """Return the ranks as text: "rank 2", "ranks 0 and 1", "ranks 0 to 3", "ranks 0, 2 and 5"."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
