"""Where the steps of a run went: medians, shares, a table, and one sentence of advice."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from phalanx.errors import ConfigError
from phalanx.measure.timer import TERMS, StepTimes, Term

_ADVICE: dict[Term, str] = {
    "data": "look for a slow disk, or for other work on these cores: samples are read ahead",
    "communication": (
        "give each rank more tokens a step: a larger microbatch or more accumulation"
    ),
    "optimizer": "give it fewer calls: more tokens a step, a fused optimizer, or a sharded one",
    "other": "look for waits for the device, or for other work, between the phases",
}


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Times of many steps, by term."""

    num_steps: int
    wall_s: float
    """Median wall time of a step."""
    medians_s: dict[Term, float]
    shares: dict[Term, float]
    """Time of each term over all steps / wall time of all steps."""

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "num_steps": self.num_steps,
            "wall_s": self.wall_s,
            "medians_s": dict(self.medians_s),
            "shares": dict(self.shares),
        }


def summarize(steps: Iterable[StepTimes]) -> StepSummary:
    """Sum up the steps; leave out warm-up steps before the call.

    Raises:
        ConfigError: there is no step.
    """
    known = list(steps)
    if not known:
        raise ConfigError("no step was measured, so there is nothing to sum up")
    wall_s = sum(step.wall_s for step in known)
    return StepSummary(
        num_steps=len(known),
        wall_s=statistics.median(step.wall_s for step in known),
        medians_s={term: statistics.median(step.term_s(term) for step in known) for term in TERMS},
        shares={term: sum(step.term_s(term) for step in known) / wall_s for term in TERMS},
    )


def summary_table(summary: StepSummary) -> Table:
    """Draw the summary: one row a term, the median in ms and the share of the wall time."""
    steps = "step" if summary.num_steps == 1 else "steps"
    table = Table(title=f"Where {summary.num_steps:,} {steps} went", title_justify="left")
    table.add_column("term")
    table.add_column("median ms", justify="right")
    table.add_column("share", justify="right")
    for term in TERMS:
        share = summary.shares[term]
        table.add_row(term, f"{1e3 * summary.medians_s[term]:.1f}", f"{100 * share:.1f} %")
    table.add_section()
    total = sum(summary.shares.values())
    table.add_row("step (wall)", f"{1e3 * summary.wall_s:.1f}", f"{100 * total:.1f} %")
    return table


def advice(summary: StepSummary, *, sends_inside: bool = False) -> str:
    """Name the largest term that is not the model's own arithmetic, and what would shrink it.

    Args:
        summary: where the time went.
        sends_inside: forward and backward hold communication of their own, as under fsdp and tp.
    """
    term = max(_ADVICE, key=lambda term: summary.shares[term])
    share = summary.shares[term]
    model_share = summary.shares["forward"] + summary.shares["backward"]
    if share < 0.05:
        return (
            f"Forward and backward take {100 * model_share:.0f} % of the step and no other term 5 "
            "% or more: what is left to gain is in the model's own arithmetic, which MFU measures"
            + (", and in what its layers send." if sends_inside else ".")
        )
    words = "Exposed communication" if term == "communication" else term.capitalize()
    return f"{words} takes {100 * share:.0f} % of the step: {_ADVICE[term]}." + (
        " What layers send is within forward and backward." if sends_inside else ""
    )
