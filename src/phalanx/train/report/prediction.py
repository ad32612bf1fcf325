"""What the planner predicts of a run, beside what the run has measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Column, Table

from phalanx.launch.local import num_cores
from phalanx.measure.memory import Kind
from phalanx.measure.memory_report import MemoryReport
from phalanx.measure.summary import StepSummary
from phalanx.measure.timer import Term
from phalanx.planner.calibration import ASSUMED, this_machine
from phalanx.planner.held import memory
from phalanx.planner.planned import PlannedStep
from phalanx.planner.price import price
from phalanx.planner.software import SOFTWARE

_TERMS: Mapping[str, tuple[Term, ...]] = {
    "compute": ("forward", "backward"),
    "communication": ("communication",),
    "optimizer": ("optimizer",),
}
"""Cause of a predicted time -> the terms of a measured step that it stands for."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A figure as predicted and as measured: seconds of a step, or bytes at the peak."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    def text(self, scale: float, unit: str) -> str:
        """Return both, and the error in percent."""
        both = f"{self.predicted / scale:,.4g} {unit}, measured {self.measured / scale:,.4g}"
        return f"{both} ({self.error:+.0%})"


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the planner says of a run on the machine at hand, before anything of it is known.

    Attributes:
        machine: what the machine is described by.
        step_s: of the median step.
        time_s: cause -> seconds of it.
        at_most: what rank 0 holds, by kind, each at its most.
        at_peak: the same at the moment of its peak; their sum is the peak.
    """

    machine: str
    step_s: float
    time_s: Mapping[str, float]
    at_most: Mapping[Kind, int]
    at_peak: Mapping[Kind, int]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What was predicted, beside what was measured.

    Attributes:
        machine: what the machine is described by.
        time_s: `step`, and its causes -> seconds.
        bytes: `peak`, what rank 0 holds of each kind at its most, and as `passing` of activations,
            casts and buffers of collectives together, which the planner counts in one run -> bytes.
        bytes_at_peak: what it holds of each kind at its peak, whose sum `peak` is; the measured one
            has `communication` and `other` beside.
        errors: of each of these, predicted over measured, less 1.
    """

    machine: str
    time_s: Mapping[str, Forecast]
    bytes: Mapping[str, Forecast]
    bytes_at_peak: Mapping[str, Forecast]
    errors: Mapping[str, float]

    def line(self) -> str:
        """Return step and peak in a line or two."""
        words = [f"{self.time_s['step'].text(1e-3, 'ms')} a step"] if self.time_s else []
        if self.bytes:
            words.append(f"{self.bytes['peak'].text(2**20, 'MiB')} at the peak")
        return f"{'; '.join(words)}; by {self.machine}"

    def table(self) -> Table:
        """Draw the times by cause."""
        heads = (Column(name, justify="right") for name in ("predicted ms", "median ms", "error"))
        title = "Predicted beside measured"
        table = Table("cause", *heads, title=title, title_justify="left")
        for cause, of in self.time_s.items():
            numbers = (f"{1e3 * each:,.1f}" for each in (of.predicted, of.measured))
            table.add_row(cause, *numbers, f"{100 * of.error:+.1f} %" if of.measured else "")
        return table


def predict(planned: PlannedStep, ceiling: float | None) -> Predicted | None:
    """Predict a run on the machine at hand; None where its peak in the data type is unknown.

    Where no calibration file says what the machine does, the rate of products that the run itself
    has measured takes its place.

    Args:
        planned: a step of the run.
        ceiling: FLOP/s of the fastest products of one rank; None where they were not measured.
    """
    num_ranks = planned.strategy.num_ranks
    compute = ASSUMED
    if ceiling is not None:  # of a rank, which has a part of the cores
        rates = {planned.precision: ceiling * num_ranks / num_cores()}
        source = "matrix products as this run measured them"
        today = time.strftime("%Y-%m-%d")
        compute = dataclasses.replace(
            ASSUMED, best=rates, sustained=rates, source=source, date=today
        )
    cluster = this_machine(num_ranks, compute)
    if not cluster.device.has_peak(planned.precision):
        return None
    cost = price(planned, cluster, SOFTWARE["phalanx"])
    held = memory(planned, cluster.device)[0]
    link = cluster.levels[0].link
    of_links = f", links {link.source}" if num_ranks > 1 else ""
    return Predicted(
        machine=f"{cluster.device.source}, {cluster.device.date}{of_links}",
        step_s=cost.step_s,
        time_s={
            "compute": cost.compute_s,
            "communication": cost.tensor_s + cost.ring_s + cost.bubble_s + cost.exposed_s,
            "optimizer": cost.optimizer_s,
        },
        at_most=held.kinds(),
        at_peak=held.kinds_at_peak(),
    )


def judge(
    predicted: Predicted, steps: StepSummary | None, memory: MemoryReport | None
) -> Judged | None:
    """Return a prediction beside what was measured; None where nothing was."""
    time_s: dict[str, Forecast] = {}
    if steps is not None and steps.doubt is None:
        time_s["step"] = Forecast(predicted=predicted.step_s, measured=steps.wall_s)
        for cause, terms in _TERMS.items():
            measured = sum(steps.medians_s[term] for term in terms)
            time_s[cause] = Forecast(predicted=predicted.time_s[cause], measured=measured)
    held: dict[str, Forecast] = {}
    at_peak: dict[str, Forecast] = {}
    if memory is not None and memory.doubt is None:
        peak_bytes = sum(predicted.at_peak.values())
        held["peak"] = Forecast(predicted=peak_bytes, measured=memory.peak_bytes)
        passing = predicted.at_most["cast"] + predicted.at_most["activations"]
        held["passing"] = Forecast(predicted=passing, measured=memory.passing_bytes)
        for into, these, those in (
            (held, predicted.at_most, memory.at_most),
            (at_peak, predicted.at_peak, memory.at_peak),
        ):
            for kind, num_bytes in these.items():
                into[kind] = Forecast(predicted=num_bytes, measured=those[kind])
    if not time_s and not held:
        return None
    errors = {name: each.error for name, each in {**time_s, **held}.items()}
    return Judged(
        machine=predicted.machine, time_s=time_s, bytes=held, bytes_at_peak=at_peak, errors=errors
    )
