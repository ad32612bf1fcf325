"""Time of a run's steps by term: medians, fractions, a table, and one sentence of advice."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.comm.axes import is_of_shards
from phalanx.comm.ledger import Entry
from phalanx.measure.timer import TERMS, StepTimes, Term
from phalanx.report.tabular import Number, Part, Table

SUM_TOLERANCE = 0.02
"""Largest relative difference of a step's terms from its separately measured wall time."""

_ADVICE: dict[Term, str] = {
    "bubble": "use more microbatches, or a schedule with a smaller bubble (docs/strategies.md)",
    "data": "`phalanx bench data RUN` times the loader alone; look for a slow disk",
    "optimizer": "use more tokens a step, a fused optimizer, or a sharded one",
    "other": "look for waits for the device, or for other work, between the phases",
}


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Times of several steps, by term."""

    num_steps: int
    wall_s: float
    """Median wall time of a step."""
    medians_s: dict[Term, float]
    shares: dict[Term, float]
    """Time of each term over all steps / wall time of all steps; fractions of 1."""

    @property
    def doubt(self) -> str | None:
        """Reason why these times are inconsistent; None if they are consistent."""
        if self.wall_s <= 0 or min(self.shares.values()) < 0:
            return "no step times: by this clock, a term of the steps took less than 0 s"
        total = sum(self.shares.values())
        if abs(total - 1) > SUM_TOLERANCE:
            return (
                f"no step times: the terms of the steps sum to {100 * total:.0f} % of the wall time"
            )
        return None


def summarize(steps: Sequence[StepTimes]) -> StepSummary:
    """Summarize at least one step; remove warm-up steps before the call."""
    wall_s = sum(step.wall_s for step in steps)
    return StepSummary(
        num_steps=len(steps),
        wall_s=statistics.median(step.wall_s for step in steps),
        medians_s={t: statistics.median(step.terms_s[t] for step in steps) for t in TERMS},
        shares={t: sum(step.terms_s[t] for step in steps) / wall_s for t in TERMS},
    )


def summary_table(summary: StepSummary) -> Part:
    """Return a table: one row per term, with its median in ms and its fraction of wall time."""
    if doubt := summary.doubt:
        return doubt
    rows = [(term, summary.medians_s[term], summary.shares[term]) for term in TERMS]
    rows += [("step (wall)", summary.wall_s, sum(summary.shares.values()))]
    steps = "step" if summary.num_steps == 1 else "steps"
    return Table(
        f"Where {summary.num_steps:,} {steps} went",
        ("term", Number("median ms", ".1f", 1e-3), Number("share, %", ".1f", 0.01)),
        rows,
    )


def advice(summary: StepSummary, sent: Sequence[Entry] = ()) -> str:
    """Return a sentence with the largest term besides forward and backward, and its remedy."""
    if doubt := summary.doubt:
        return doubt
    term = max((*_ADVICE, "communication"), key=lambda term: summary.shares[term])
    share = summary.shares[term]
    model_share = summary.shares["forward"] + summary.shares["backward"]
    if share < 0.05:
        return (
            f"Forward and backward take {100 * model_share:.0f} % of the step and no other term 5 "
            "% or more: only the model's own arithmetic is left to improve, which MFU measures."
        )
    if term == "communication":
        advice = _communication_advice(sent)
        return f"Exposed communication takes {100 * share:.0f} % of the step: {advice}."
    return f"{term.capitalize()} takes {100 * share:.0f} % of the step: {_ADVICE[term]}."


def _communication_advice(sent: Sequence[Entry]) -> str:
    """Return advice to reduce communication over the axis that carries the most bytes."""
    by_axis: Counter[str] = Counter()
    for entry in sent:
        by_axis[entry.axis] += math.ceil(entry.sent_bytes)
    axis = next((axis for axis, _ in by_axis.most_common(1)), "dp")
    if is_of_shards(axis):
        gathers = sum(e.op == "all_gather" and e.axis == axis for e in sent)
        if gathers > 1:  # in forward and again in backward
            return (
                "most bytes are gathers of fsdp, once for each microbatch: make microbatches "
                "larger, or choose zero2, which gathers once a step, where memory allows"
            )
        return "most bytes go over fsdp, once a step: give each rank more tokens a step"
    if axis == "dp":
        return "give each rank more tokens a step: a larger microbatch or more accumulation"
    return (
        f"most bytes go over {axis}, in proportion to the tokens: use fewer ranks of {axis}, "
        "or a faster link"
    )
