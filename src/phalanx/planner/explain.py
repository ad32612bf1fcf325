"""The report of a plan for each strategy: figures, crossed links, bottleneck and cost by axis.

The text and the JSON of `phalanx plan` both use these values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx.account.planned import PURE_BYTES, STATE_BYTES, DecoderModel, PlannedStep
from phalanx.errors import StrategyError
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import check_schedule
from phalanx.planner import network
from phalanx.planner.search import Candidate, Inequality, Question, fits
from phalanx.planner.stages import with_most_experts
from phalanx.report.units import time_text
from phalanx.strategy import POSITIONS, Recompute, Strategy

NUM_REJECTED: Final = 8
"""Number of rejected strategies that are reported: the nearest to the best."""

_BOUND: Final = 0.7
"""Fraction of a step above which compute alone bounds the step."""

_WORTH: Final = 0.02
"""Fraction of a step below which a cause is not reported."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one strategy.

    Attributes:
        samples_per_s: sequences, or rows of a module's batch, per second over all data ranks.
        causes_s: cause -> seconds of the step.
        sent_s: time of all dp and fsdp communication; `causes_s` has the exposed part.
        memory: cause -> bytes on the heaviest stage at its peak; their sum is `memory_bytes`.
        exchanged: bytes that a rank sends over ep in a step, of the pipeline rank with the most
            experts: `expected` of even routing, `least` and `most` of any; empty without ep.
        memory_moment: moment of the peak: with the most activations, or with all gradients.
        devices: numbers of devices on which the run can resume with this microbatch: with the
            same or fewer replicas, if these divide the batch and the run fits.
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
    causes_s: Mapping[str, float]
    sent_s: float
    exchanged: Mapping[str, float]
    stage: int
    memory: Mapping[str, int]
    memory_moment: str
    memory_bytes: int
    usable_bytes: float
    mesh: str
    devices: Sequence[int]


def figures(question: Question[Any], candidate: Candidate) -> Figures:
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
        causes_s=causes_s(candidate),
        sent_s=cost.sent_s,
        exchanged=exchanged(planned),
        stage=candidate.memory.stage,
        memory=candidate.memory.at_peak(),
        memory_moment=candidate.memory.moment,
        memory_bytes=candidate.memory.total,
        usable_bytes=question.cluster.device.usable_bytes,
        mesh=mesh(question, planned.strategy),
        devices=sizes(question, planned),
    )


def question_values(question: Question[Any], num_devices: int) -> dict[str, Any]:
    """Return the question of a plan for its JSON document, without the name of the model."""
    is_decoder = isinstance(question.model, DecoderModel)
    return {
        "cluster": question.cluster.name,
        "device": question.cluster.device.name,
        "num_devices": num_devices,
        "usable_bytes": question.cluster.device.usable_bytes,
        "parameters": question.model.num_parameters,
        "active_parameters": question.model.num_active,
        "sequence": question.model.seq_len if is_decoder else None,
        "global_batch": question.num_sequences,
        "software": question.software.name,
        "precision": question.model.precision,
    }


def answer(
    question: Question[Any], candidates: Sequence[Candidate], rejected: Sequence[Inequality]
) -> dict[str, Any]:
    """Return the JSON document of a search, or of one strategy."""
    num = candidates[0].planned.strategy.num_ranks if candidates else question.cluster.num_devices
    return {
        "question": question_values(question, num),
        "candidates": [figures(question, each) for each in candidates],
        "rejected": [dataclasses.asdict(each) | {"text": str(each)} for each in rejected],
        "advice": advice(question, candidates[0]) if candidates else [],
    }


def arithmetic(question: Question[DecoderModel]) -> list[tuple[str, str, int]]:
    """Return what memory holds without any split, as (what, formula, bytes).

    N is the number of parameters, L the blocks, T the tokens of one sequence, h the width of the
    residual, and F the inner width of the feed-forward layers (`inner_width`).
    """
    shape, tokens = question.model.shape, question.model.seq_len
    num = question.model.num_parameters
    whole = "weights, gradients and the two moments of AdamW"
    rows = [
        ("weights, 32 bits", "4 N", 4 * num),
        ("weights, 16 bits", "2 N", 2 * num),
        (f"{whole}, 16 bits", f"{PURE_BYTES} N", PURE_BYTES * num),
        (f"{whole}, 32 bits, as train", f"{STATE_BYTES} N", STATE_BYTES * num),
    ]
    for name, width in (("4 h", 4 * shape.hidden), ("F", inner_width(shape))):
        what = f"a feed-forward activation of width {name}, 16 bits, all blocks, one sequence"
        rows.append((what, f"2 L T {name}", 2 * shape.num_layers * tokens * width))
    return rows


def inner_width(shape: ModelShape) -> int:
    """Return the inner width of the feed-forward layers that a token visits, experts together."""
    if (experts := shape.experts) is None:
        return shape.ffn
    return experts.top_k * experts.ffn + experts.shared_ffn


def exchanged(planned: PlannedStep[Any]) -> dict[str, float]:
    """Return the bytes that a rank with the most experts sends over ep in a step; see `Figures`."""
    if planned.strategy.ep.degree == 1:
        return {}
    sizes = [(planned.microbatch, planned.seq_len)] * planned.accumulation
    model: DecoderModel = planned.model.without_losses
    first = dataclasses.replace(planned, model=model).plan
    plan, _ = with_most_experts(first, model.shape)
    least, most = plan.exchange_bounds(sizes)
    entries = plan.traffic(sizes)
    expected = sum(e.sent_bytes for e in entries if e.axis == "ep" and e.op == "all_to_all")
    return {"least": least, "expected": expected, "most": most}


def causes_s(candidate: Candidate) -> dict[str, float]:
    """Return the seconds of a step by cause."""
    cost = candidate.price
    return {
        "compute": cost.compute_s,
        "tp": cost.tensor_s,
        POSITIONS: cost.ring_s,
        "ep": cost.experts_s,
        "counting": cost.counting_s,
        "pp": cost.bubble_s,
        _of_data(candidate.planned.strategy): cost.exposed_s,
        "optimizer": cost.optimizer_s,
    }


def _of_data(strategy: Strategy) -> str:
    return " and ".join(n for n in ("dp", "fsdp") if getattr(strategy, n).degree > 1) or "dp"


def mesh(question: Question[Any], strategy: Strategy) -> str:
    """Return text: each axis, outer to inner, with the smallest unit that contains its groups."""
    axes, job = strategy.mesh_axes(), question.cluster.of(strategy.num_ranks)
    if strategy.num_ranks == 1:
        return "one device"
    levels = [
        f"{name}{size} within a {network.reach(group, job, question.software).level}"
        for name, size in axes.items()
        for group in [network.group_of(axes, (name,))]
    ]
    return ", ".join(levels)


def sizes(question: Question[Any], planned: PlannedStep[Any]) -> list[int]:
    """Return the numbers of devices, up to the strategy's, on which the run can resume."""
    strategy = planned.strategy
    axis = "fsdp" if strategy.dp.degree == 1 else "dp"
    most: int = getattr(strategy, axis).degree
    inner = strategy.num_ranks // most
    rows = question.num_sequences // (strategy.data_ranks // most) // planned.microbatch
    degrees = [n for n in range(1, most + 1) if rows % n == 0]

    def can_resume(degree: int) -> bool:
        of_axis = dataclasses.replace(getattr(strategy, axis), degree=degree)
        split = dataclasses.replace(
            strategy, **{axis: of_axis if degree > 1 else getattr(Strategy, axis)}
        )
        fewer = dataclasses.replace(planned, strategy=split, accumulation=rows // degree)
        try:
            check_schedule(split, rows // degree)
            return not isinstance(fits(question, fewer), Inequality)
        except StrategyError:  # fewer ranks cannot split a part of the model
            return False

    return [inner * degree for degree in degrees if can_resume(degree)]


def neighbours(best: Candidate | None, rejected: Sequence[Inequality]) -> list[Inequality]:
    """Return the rejected strategies nearest to `best`; if None, those with the least excess."""
    if best is None:
        nearest = sorted(rejected, key=lambda each: each.left / each.right)
    else:
        chosen = best.planned.strategy

        def distance(each: Inequality) -> float:
            """Count how often degrees double or halve, + 0.5 per other kind, + 1 for recompute."""
            other = Strategy.parse(each.strategy)
            steps_apart = float(chosen.recompute != other.recompute)
            for (_, axis), (_, beside) in zip(chosen.axes(), other.axes(), strict=True):
                steps_apart += abs(math.log2(axis.degree / beside.degree))
                steps_apart += 0.5 * ((axis.kind, axis.option) != (beside.kind, beside.option))
            return steps_apart

        nearest = sorted(rejected, key=distance)
    # Kinds of one axis often need equal memory: report only one of them.
    alike = {(each.what, each.left): each for each in reversed(nearest)}
    return [each for each in nearest if alike[each.what, each.left] is each][:NUM_REJECTED]


def advice(question: Question[Any], candidate: Candidate) -> list[str]:
    """Return lines of advice: what bounds the step, the cost of each axis, and how to lower it."""
    of = figures(question, candidate)
    largest = max(of.causes_s, key=lambda cause: of.causes_s[cause])
    part = of.causes_s[largest] / of.step_time_s
    said = [
        f"{_NAMES.get(largest, largest)} bounds the step: {part:.0%} of {time_text(of.step_time_s)}"
    ]
    if largest == "compute" and part > _BOUND:
        said[0] += "; more devices shorten the step"
    said += [line for _, line in sorted(_of_axes(of, candidate), reverse=True)]
    planned, policy = candidate.planned, candidate.planned.strategy.recompute
    if policy != Recompute():
        kept = dataclasses.replace(planned.strategy, recompute=Recompute())
        failed = fits(question, dataclasses.replace(planned, strategy=kept))
        if isinstance(failed, Inequality):
            said.append(
                f"recompute:{policy.kind} makes the strategy fit; without recomputation, {failed}"
            )
    left = (of.usable_bytes - of.memory_bytes) / 2**30
    said.append(f"{left:.1f} GiB of each device are free on the heaviest stage")
    return said


_NAMES: Final = {"compute": "compute", "pp": "the bubble of pp", "optimizer": "the optimizer"}


def _of_axes(of: Figures, candidate: Candidate) -> Iterator[tuple[float, str]]:
    """Yield (seconds, text) for each cause above `_WORTH` but compute, with a way to lower it."""
    strategy = candidate.planned.strategy
    data = _of_data(strategy)
    noun = "microbatch" if of.accumulation == 1 else "microbatches"
    levers = {
        "tp": "that compute does not hide; a lower degree sends less",
        POSITIONS: "of ring communication that attention does not hide; a lower degree or longer "
        "sequences hide more",
        "ep": "in which rows travel to their experts and back; a lower degree sends fewer",
        "counting": "for forwards that count the tokens of experts before the first backward, "
        "because their losses are over the global batch; one microbatch without pp needs none",
        "pp": f"for the bubble of {strategy.pp.degree} stages with "
        f"{of.accumulation:,} {noun}; a larger batch with more microbatches lowers this part",
        data: f"of {time_text(of.sent_s)} of communication, which compute does not hide; "
        "a larger batch hides more",
        "optimizer": "for the optimizer's step; more shards shorten it",
    }
    for cause, lever in levers.items():
        seconds = of.causes_s[cause]
        if seconds > _WORTH * of.step_time_s:
            axes = dict(strategy.axes())
            parts = (f"{n}{axes[n].degree}" if n in axes else n for n in cause.split(" and "))
            name = ",".join(parts)
            yield (
                seconds,
                f"{name} costs {time_text(seconds)} ({seconds / of.step_time_s:.0%}) {lever}",
            )
