"""Times of steps on every rank: each rank keeps its own, and rank 0 gathers them now and then.

step         1   2   3   4   5   6   7   8   9        keeps on each rank
gather       x   x           x           x            about once a second: one `RankWindow`
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.comm.axes import axes_of, flattened
from phalanx.measure.timer import TERMS, StepTimes, Term
from phalanx.report.tabular import Number, Table

WORK: tuple[Term, ...] = ("data", "forward", "backward", "optimizer", "other")
"""Terms in which a rank waits for no other rank."""

WARMUP_STEPS = 3
"""First steps of a run, which no rank is judged by."""

STAGE_TOLERANCE = 2.0
"""Work of a stage relative to the other stages, up to which it counts as planned."""

Times = NDArray[np.float64]


class Slowest(NamedTuple):
    """The rank that had the most work in a step, and the term that exceeds its peers' the most.

    Attributes:
        excess_s: seconds above the median of its peers; of a slow stage, whose first rank this is,
            above the other stages.
    """

    rank: int
    term: Term
    excess_s: float


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """Times of consecutive steps on every rank, in seconds: a record `ranks` of metrics.jsonl.

    Peers are the ranks with the same pp coordinate. A rank that is alone in its stage is compared
    with the other stages, from STAGE_TOLERANCE on.

    Attributes:
        steps: numbers of the steps, from 1.
        hosts: host of each rank.
        axes: mesh axis -> size, outer to inner, so that a rank's number has its coordinates.
        spread: term, or "wall" -> least, median and most over ranks, for each step.
        by_rank: term, or "wall" -> mean over the steps, for each rank.
        slowest: for each step; None if no rank has more work than its peers, and for a step that
            follows a save.
        excess: term of WORK, or "work" -> for each step the rank that most exceeds the median of
            its peers, by how much, and by how much it exceeds the next rank; "stage TERM" with pp
            -> the same for the stage that most exceeds the others, as its first rank.
        least_exposed: mesh axis -> median over the steps of the shortest wait in a group of ranks,
            for each group: the rank that comes last waits only for the link.
        sent: mesh axis -> calls and bytes of rank 0 in a step; empty before they are counted.
    """

    steps: Sequence[int]
    hosts: Sequence[str]
    axes: Mapping[str, int]
    spread: Mapping[str, Sequence[Sequence[float]]]
    by_rank: Mapping[str, Sequence[float]]
    slowest: Sequence[Slowest | None]
    exposed: Mapping[str, Sequence[float]]
    excess: Mapping[str, Sequence[tuple[int, float, float]]] = field(default_factory=dict)
    least_exposed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    sent: Mapping[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """Times of a run's steps on every rank, in seconds a step: medians over windows, by steps.

    Attributes:
        num_steps: steps after the warm-up.
        hosts: host of each rank.
        terms_s: term, or "wall" -> each rank's time.
        exposed_s: mesh axis -> each rank's exposed communication.
    """

    num_steps: int
    hosts: Sequence[str]
    terms_s: Mapping[str, Sequence[float]]
    exposed_s: Mapping[str, Sequence[float]]

    def table(self) -> Table:
        """Return a table of least, median and most over ranks, and the rank of the most."""
        rows: list[Sequence[str | float]] = []
        wall_s = statistics.mean(self.terms_s["wall"])
        named = {"communication": [(f"  over {axis}", of) for axis, of in self.exposed_s.items()]}
        for term, times_s in self.terms_s.items():
            term = "step (wall)" if term == "wall" else term
            for name, of in [(term, times_s), *named.get(term, [])]:
                rank = max(range(len(of)), key=of.__getitem__)
                least, most, share = min(of), max(of), statistics.mean(of) / wall_s
                rows.append((name, least, statistics.median(of), most, f"rank {rank}", share))
        numbers = [Number(f"{name} ms", ",.1f", 1e-3) for name in ("least", "median", "most")]
        heads = ("term", *numbers, "most on", Number("share, %", ".1f", 0.01))
        return Table(f"Where {self.num_steps:,} steps went, by rank", heads, rows)


def summarize_ranks(windows: Sequence[RankWindow]) -> RankSummary | None:
    """Summarize the windows after the warm-up, or all of a shorter run; None without windows."""
    begin = windows[0].steps[0] + WARMUP_STEPS if windows else 0
    windows = [window for window in windows if window.steps[0] >= begin] or windows
    if not windows:
        return None

    def typical(of: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
        names = dict.fromkeys(name for each in of for name in each)
        repeated = [each for each, w in zip(of, windows, strict=True) for _ in w.steps]
        none = [0.0] * len(windows[0].hosts)
        return {n: np.median([each.get(n, none) for each in repeated], 0).tolist() for n in names}

    return RankSummary(
        num_steps=sum(len(window.steps) for window in windows),
        hosts=windows[-1].hosts,
        terms_s=typical([window.by_rank for window in windows]),
        exposed_s=typical([window.exposed for window in windows]),
    )


def groups_of(axes: Mapping[str, int], name: str) -> list[list[int]]:
    """Return the ranks of each group over an axis or a set (comm.axes), first ranks first."""
    numbers, members = np.arange(math.prod(axes.values())).reshape(*axes.values()), [*axes]
    over = [members.index(axis) for axis in axes_of(name, axes)]
    size = math.prod(numbers.shape[at] for at in over)
    return np.moveaxis(numbers, over, range(-len(over), 0)).reshape(-1, size).tolist()


def stages_of(axes: Mapping[str, int]) -> list[list[int]]:
    """Return the ranks at each pp coordinate; all ranks without pp."""
    return np.array(groups_of(axes, "pp")).T.tolist() if "pp" in axes else groups_of(axes, "job")


def table_of(times: Sequence[StepTimes], axes: Mapping[str, int]) -> Times:
    """Return the times of one rank as an array: a row for each step, the columns of `window_of`."""
    names = _wait_axes(axes)
    rows = [
        [*of.terms_s.values(), of.wall_s, *(of.exposed_s.get(name, 0.0) for name in names)]
        for of in times
    ]
    return np.array(rows)


def _wait_axes(axes: Mapping[str, int]) -> list[str]:
    """Return the names of the axes over which a rank may wait."""
    return [*axes, *flattened(axes), "world"]


def window_of(
    steps: Sequence[int],
    hosts: Sequence[str],
    axes: Mapping[str, int],
    tables: Sequence[Times],
    *,
    saved: Collection[int] = (),
    planned: Sequence[Sequence[float]] = (),
    sent: Mapping[str, tuple[int, float]] | None = None,
) -> RankWindow:
    """Return the window of `steps`, given the table of each rank.

    Args:
        steps: numbers of the steps.
        hosts: host of each rank.
        axes: mesh axes of the job.
        tables: for each rank the result of `table_of`.
        saved: steps that follow a save.
        planned: work of each stage in forward and backward, by one or several measures.
        sent: see `RankWindow`.
    """
    names = [*TERMS, "wall", *_wait_axes(axes)]
    columns = dict(zip(names, np.stack(tables, 1).transpose(2, 1, 0).round(7), strict=True))
    spread: dict[str, list[list[float]]] = {}
    by_rank: dict[str, list[float]] = {}
    for name in (*TERMS, "wall"):
        of = columns[name]  # [rank, step]
        spread[name] = np.stack([of.min(0), np.median(of, 0), of.max(0)], 1).tolist()
        by_rank[name] = of.mean(1).round(7).tolist()
    exposed = {name: columns[name] for name in _wait_axes(axes) if columns[name].any()}
    least = {
        name: [round(float(np.median(of[ranks].min(0))), 7) for ranks in groups_of(axes, name)]
        for name, of in exposed.items()
        if name != "world"
    }
    stages = stages_of(axes)
    of_ranks, of_stages = _excess(np.stack([columns[term] for term in WORK]), stages, planned)
    every = {"": of_ranks, "stage ": of_stages} if len(stages) > 1 else {"": of_ranks}
    most: dict[str, list[tuple[int, float, float]]] = {}
    for level, excess in every.items():
        excess[:, :, [step in saved for step in steps]] = 0
        for name, of in zip((*WORK, "work"), [*excess, excess.sum(0)], strict=True):
            next_s, most_s = np.partition(of, -2, 0)[-2:].clip(0)
            above = most_s.round(7).tolist(), (most_s - next_s).round(7).tolist()
            most[level + name] = list(zip(of.argmax(0).tolist(), *above, strict=True))
    slowest: list[Slowest | None] = []
    for step in range(len(steps)):
        level = max(every, key=lambda level: most[f"{level}work"][step][1])
        rank, seconds, _ = most[f"{level}work"][step]
        term = int(every[level][:, rank, step].argmax())
        above_s = min(seconds, round(float(every[level][term, rank, step]), 7))
        slowest.append(Slowest(rank, WORK[term], above_s) if above_s > 0 else None)
    return RankWindow(
        steps=[*steps],
        hosts=hosts,
        axes=axes,
        spread=spread,
        by_rank=by_rank,
        slowest=slowest,
        excess=most,
        exposed={axis: of.mean(1).round(7).tolist() for axis, of in exposed.items()},
        least_exposed=least,
        sent=sent or {},
    )


def _excess(
    work: Times, stages: Sequence[Sequence[int]], planned: Sequence[Sequence[float]]
) -> tuple[Times, Times]:
    """Return by how much work [term, rank, step] exceeds the peers', and a stage's the others'."""
    of_ranks, of_stages = np.zeros_like(work), np.zeros_like(work)
    typical = np.stack([_low_median(work[:, ranks], 1) for ranks in stages], 1)
    # A stage is slow only if it takes longer than its part by each measure, and an equal part.
    is_model = np.array([[term in ("forward", "backward")] for term in WORK])
    expected = np.zeros_like(typical)
    for weights in (np.ones(len(stages)), *map(np.array, planned)):
        parts = np.where(is_model, np.maximum(weights / weights.mean(), 1e-3), 1.0)[:, :, None]
        expected = np.maximum(expected, _low_median(typical / parts, 1)[:, None] * parts)
    is_slow = typical.sum(0) > STAGE_TOLERANCE * expected.sum(0)  # [stage, step]
    for stage, ranks in enumerate(stages):
        of_ranks[:, ranks] = work[:, ranks] - typical[:, stage : stage + 1]
        of_stages[:, ranks[0]] = (typical - expected)[:, stage] * is_slow[stage]
    return of_ranks, of_stages


def _low_median(values: Times, dim: int) -> Times:
    """Return the median along `dim`; of an even number of values, the lower of the middle two."""
    middle = (values.shape[dim] - 1) // 2
    return np.take(np.partition(values, middle, dim), middle, dim)
