"""Times of steps on every rank: each rank keeps its own, and rank 0 gathers them now and then.

step         1   2   3   4   5   6   7   8   9        keeps on each rank
gather       x   x           x           x            about once a second: one `RankWindow`
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from phalanx.comm.axes import axes_of
from phalanx.measure.timer import TERMS, StepTimes, Term
from phalanx.report.tabular import Number, Table

WORK: tuple[Term, ...] = ("data", "forward", "backward", "optimizer", "other")
"""Terms in which a rank waits for no other rank."""

WARMUP_STEPS = 3
"""First steps of a run, which no rank is judged by."""

STAGE_TOLERANCE = 2.0
"""Work of a stage relative to the other stages, up to which it counts as planned."""

Times = NDArray[np.float64]


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
        exposed: mesh axis -> mean exposed communication of a step, for each rank.
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
        named = dict[str, Sequence[float]]()
        for term, times_s in self.terms_s.items():
            named["step (wall)" if term == "wall" else term] = times_s
            if term == "communication":
                named |= {f"  over {axis}": of for axis, of in self.exposed_s.items()}
        wall_s, rows = statistics.mean(self.terms_s["wall"]), list[Sequence[str | float]]()
        for name, of in named.items():
            most, share = f"rank {int(np.argmax(of))}", statistics.mean(of) / wall_s
            rows.append((name, min(of), statistics.median(of), max(of), most, share))
        numbers = [Number(f"{name} ms", ",.1f", 1e-3) for name in ("least", "median", "most")]
        heads = ("term", *numbers, "most on", Number("share, %", ".1f", 0.01))
        return Table(f"Where {self.num_steps:,} steps went, by rank", heads, rows)


def summarize_ranks(windows: Sequence[RankWindow]) -> RankSummary | None:
    """Summarize the windows after the warm-up, or all of a shorter run; None without windows."""
    if not windows:
        return None
    begin = windows[0].steps[0] + WARMUP_STEPS
    windows = [window for window in windows if window.steps[0] >= begin] or windows

    def typical(group: str) -> dict[str, list[float]]:
        groups = [getattr(window, group) for window in windows for _ in window.steps]
        none = [0.0] * len(windows[0].hosts)
        names = dict.fromkeys(name for of in groups for name in of)
        return {n: np.median([of.get(n, none) for of in groups], 0).tolist() for n in names}

    return RankSummary(
        num_steps=sum(len(window.steps) for window in windows),
        hosts=windows[-1].hosts,
        terms_s=typical("by_rank"),
        exposed_s=typical("exposed"),
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


def window_of(
    steps: Sequence[int],
    hosts: Sequence[str],
    axes: Mapping[str, int],
    ranks: Sequence[Sequence[StepTimes]],
    *,
    saved: Collection[int] = (),
    planned: Sequence[Sequence[float]] = (),
    sent: Mapping[str, tuple[int, float]] = MappingProxyType({}),
) -> RankWindow:
    """Return the window of `steps`, given their times on each rank.

    Args:
        steps: numbers of the steps.
        hosts: host of each rank.
        axes: mesh axes of the job.
        ranks: times of the steps, for each rank.
        saved: steps that follow a save.
        planned: work of each stage in forward and backward, by one or several measures.
        sent: see `RankWindow`.
    """
    names = (*TERMS, "wall")
    waited = dict.fromkeys(axis for times in ranks for of in times for axis in of.exposed_s)
    rows = [
        [
            [*of.terms_s.values(), of.wall_s, *(of.exposed_s.get(axis, 0.0) for axis in waited)]
            for of in times
        ]
        for times in ranks
    ]
    columns = np.array(rows).round(7).transpose(2, 0, 1)  # [name, rank, step]
    timed = dict(zip(names, columns, strict=False))
    exposed = dict(zip(waited, columns[len(names) :], strict=True))
    stages = stages_of(axes)
    of_ranks, of_stages = _excess(np.stack([timed[term] for term in WORK]), stages, planned)
    most: dict[str, list[tuple[int, float, float]]] = {}
    for level, excess in {"": of_ranks, "stage ": of_stages}.items():
        if level and len(stages) == 1:
            continue
        excess[:, :, [step in saved for step in steps]] = 0
        for name, of in zip((*WORK, "work"), [*excess, excess.sum(0)], strict=True):
            next_s, most_s = np.partition(of, -2, 0)[-2:].clip(0)
            above = most_s.round(7).tolist(), (most_s - next_s).round(7).tolist()
            most[level + name] = list(zip(of.argmax(0).tolist(), *above, strict=True))
    return RankWindow(
        steps=[*steps],
        hosts=hosts,
        axes=axes,
        spread={
            name: np.stack([of.min(0), np.median(of, 0), of.max(0)], 1).tolist()
            for name, of in timed.items()
        },
        by_rank={name: of.mean(1).round(7).tolist() for name, of in timed.items()},
        exposed={axis: of.mean(1).round(7).tolist() for axis, of in exposed.items()},
        excess=most,
        least_exposed={
            axis: [round(float(np.median(of[group].min(0))), 7) for group in groups_of(axes, axis)]
            for axis, of in exposed.items()
            if axis != "world"
        },
        sent={**sent},
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
