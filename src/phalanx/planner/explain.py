"""What a plan says of each strategy: its figures, what it crosses, what bounds it, what it costs.

The text and the JSON of `phalanx plan` are both made of these values.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.errors import time_text
from phalanx.planner import network
from phalanx.planner.planned import PlannedStep
from phalanx.planner.recipe import RING
from phalanx.planner.search import Candidate, Inequality, Question, fits
from phalanx.strategy import Axis, Recompute, Strategy

GRADES: Final = ((0.4, "excellent"), (0.3, "good"))
"""An MFU above the number -> its grade; `low` below all."""

NUM_REJECTED: Final = 8
"""Rejected strategies that are shown: the nearest to the best."""

_BOUND: Final = 0.7
"""Part of a step above which compute alone bounds it."""

WORTH: Final = 0.02
"""Part of a step below which a cause needs no advice."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one strategy.

    Attributes:
        samples_per_s: sequences, or rows of a module's batch, that all data ranks must read.
        causes_s: cause -> its seconds of the step.
        sent_s: seconds in which dp and fsdp send, of which `causes_s` has the exposed part.
        memory: cause -> bytes on the heaviest stage at the moment of its peak; their sum is
            `memory_bytes`.
        memory_moment: when the peak is: with the most activations, or with all gradients.
        devices: numbers of devices on which the run can resume with this microbatch: fewer or as
            many replicas, which divide the batch and fit.
    """

    strategy: str
    microbatch: int
    accumulation: int
    step_time_s: float
    t_theoretical_s: float
    tokens_per_s_per_device: float
    samples_per_s: float
    mfu_causal: float
    mfu_full: float
    grade: str
    causes_s: Mapping[str, float]
    sent_s: float
    stage: int
    memory: Mapping[str, int]
    memory_moment: str
    memory_bytes: int
    usable_bytes: float
    mesh: str
    devices: Sequence[int]


def grade(mfu: float) -> str:
    """Return what an MFU of a large model is called."""
    return next((word for least, word in GRADES if mfu > least), "low")


def figures(question: Question, candidate: Candidate) -> Figures:
    """Return the figures of a strategy that fits."""
    planned, cost = candidate.planned, candidate.price
    tokens = planned.num_sequences * planned.seq_len
    num_ranks = planned.strategy.num_ranks
    return Figures(
        strategy=str(planned.strategy),
        microbatch=planned.microbatch,
        accumulation=planned.accumulation,
        step_time_s=cost.step_s,
        t_theoretical_s=cost.theoretical_s,
        tokens_per_s_per_device=tokens / cost.step_s / num_ranks,
        samples_per_s=planned.num_sequences / cost.step_s,
        mfu_causal=cost.mfu,
        mfu_full=cost.mfu_full,
        grade=grade(cost.mfu),
        causes_s=causes_s(candidate),
        sent_s=cost.sent_s,
        stage=candidate.memory.stage,
        memory=candidate.memory.at_peak(),
        memory_moment=candidate.memory.moment,
        memory_bytes=candidate.memory.total,
        usable_bytes=question.cluster.device.usable_bytes,
        mesh=mesh(question, planned.strategy),
        devices=sizes(question, planned),
    )


def causes_s(candidate: Candidate) -> dict[str, float]:
    """Return the seconds of a step by cause."""
    cost = candidate.price
    return {
        "compute": cost.compute_s,
        "tp": cost.tensor_s,
        RING: cost.ring_s,
        "pp": cost.bubble_s,
        _of_data(candidate.planned.strategy): cost.exposed_s,
        "optimizer": cost.optimizer_s,
    }


def _of_data(strategy: Strategy) -> str:
    return " and ".join(n for n in ("dp", "fsdp") if getattr(strategy, n).degree > 1) or "dp"


def mesh(question: Question, strategy: Strategy) -> str:
    """Return the axes, outer to inner, and the unit of the cluster that each stays within."""
    axes, job = strategy.mesh_axes(), question.cluster.of(strategy.num_ranks)
    if strategy.num_ranks == 1:
        return "one device"
    levels = [
        f"{name}{size} within a {network.reach(group, job, question.software).level}"
        for name, size in axes.items()
        for group in [network.group_of(axes, (name,))]
    ]
    return ", ".join(levels)


def sizes(question: Question, planned: PlannedStep) -> list[int]:
    """Return the numbers of devices, up to the cluster's, on which the run can resume."""
    strategy = planned.strategy
    axis = "fsdp" if strategy.dp.degree == 1 else "dp"
    most: int = getattr(strategy, axis).degree
    inner = strategy.num_ranks // most
    rows = question.num_sequences // (strategy.data_ranks // most) // planned.microbatch
    # Interleaved chunks need a multiple of stages of microbatches.
    unit = strategy.pp.degree if strategy.pp.kind == "interleaved" else 1
    degrees = [n for n in range(1, most + 1) if rows % n == 0 and rows // n % unit == 0]

    def can_resume(degree: int) -> bool:
        of_axis = dataclasses.replace(getattr(strategy, axis), degree=degree)
        split = dataclasses.replace(
            strategy, **{axis: of_axis if degree > 1 else getattr(Strategy, axis)}
        )
        fewer = dataclasses.replace(planned, strategy=split, accumulation=rows // degree)
        return not isinstance(fits(question, fewer), Inequality)

    # With fewer replicas each holds as much or more.
    least = bisect.bisect_left(degrees, True, key=can_resume)
    return [inner * degree for degree in degrees[least:]]


def neighbours(best: str | None, rejected: Sequence[Inequality]) -> list[Inequality]:
    """Return the rejected strategies that are nearest to the best; without one, to fitting."""
    if best is None:
        nearest = sorted(rejected, key=lambda each: each.left / each.right)
    else:
        own = Strategy.parse(best)
        nearest = sorted(rejected, key=lambda each: _distance(own, Strategy.parse(each.strategy)))
    # Kinds of one axis often hold the same: one of them is enough.
    alike = {(each.what, each.left): each for each in reversed(nearest)}
    return [each for each in nearest if alike[each.what, each.left] is each][:NUM_REJECTED]


def _distance(one: Strategy, other: Strategy) -> float:
    """Return how often degrees must be doubled or halved, and kinds changed at half the price."""
    found = float(one.recompute != other.recompute)
    for (_, axis), (_, beside) in zip(one.axes(), other.axes(), strict=True):
        found += abs(math.log2(axis.degree / beside.degree))
        found += 0.5 * ((axis.kind, axis.option) != (beside.kind, beside.option))
    return found


def advice(question: Question, candidate: Candidate) -> list[str]:
    """Return what bounds the step of a strategy, what each axis costs, and what would lower it."""
    of = figures(question, candidate)
    largest = max(of.causes_s, key=lambda cause: of.causes_s[cause])
    part = of.causes_s[largest] / of.step_time_s
    said = [
        f"{_NAMES.get(largest, largest)} bounds the step: {part:.0%} of {time_text(of.step_time_s)}"
    ]
    if largest == "compute" and part > _BOUND:
        said[0] += ", so that more devices shorten it"
    said += [line for _, line in sorted(_of_axes(of, candidate), reverse=True)]
    if (line := _of_recompute(question, candidate)) is not None:
        said.append(line)
    left = (of.usable_bytes - of.memory_bytes) / 2**30
    said.append(f"{left:.1f} GiB of each device are free on the heaviest stage")
    return said


_NAMES: Final = {"compute": "compute", "pp": "the bubble of pp", "optimizer": "the optimizer"}


def _of_axes(of: Figures, candidate: Candidate) -> Iterator[tuple[float, str]]:
    """Yield what each axis costs that is worth a word, and what would lower it."""
    strategy = candidate.planned.strategy
    data = _of_data(strategy)
    levers = {
        "tp": "that compute does not hide; a lower degree sends less",
        RING: "in rings that attention does not hide; a lower degree or longer sequences hide more",
        "pp": f"in its bubble on {strategy.pp.degree} stages of {_microbatches(of.accumulation)}; "
        "a larger batch of more microbatches lowers this part",
        data: f"of {time_text(of.sent_s)} sent, which compute does not hide; "
        "a larger batch hides more",
        "optimizer": "in the step of AdamW; more shards shorten it",
    }
    for cause, lever in levers.items():
        seconds = of.causes_s[cause]
        if seconds > WORTH * of.step_time_s:
            name = cause if cause == "optimizer" else _text(strategy, cause)
            yield (
                seconds,
                f"{name} costs {time_text(seconds)} ({seconds / of.step_time_s:.0%}) {lever}",
            )


def _microbatches(num: int) -> str:
    return f"{num:,} microbatch{'' if num == 1 else 'es'}"


def _text(strategy: Strategy, cause: str) -> str:
    names = cause.split(" and ")
    alone: list[Axis] = [getattr(strategy, name) for name in names]
    return ",".join(f"{name}{axis.degree}" for name, axis in zip(names, alone, strict=True))


def _of_recompute(question: Question, candidate: Candidate) -> str | None:
    """Return why a strategy recomputes, if memory is the reason."""
    planned = candidate.planned
    if planned.strategy.recompute == Recompute():
        return None
    kept = dataclasses.replace(planned.strategy, recompute=Recompute())
    held = fits(question, dataclasses.replace(planned, strategy=kept))
    kind = planned.strategy.recompute.kind
    if not isinstance(held, Inequality):
        return None
    return f"recompute:{kind} makes it fit; without, {held}"
