"""Compare the planner's prediction of a run's step time and memory with the measurement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.account.planned import PlannedStep
from phalanx.account.rank_memory import memory
from phalanx.comm.ledger import Entry
from phalanx.measure.memory import Kind
from phalanx.measure.memory_report import MemoryReport
from phalanx.measure.summary import StepSummary
from phalanx.measure.timer import Term
from phalanx.planner.calibration import as_cluster
from phalanx.planner.calibration_file import THIS, Calibration
from phalanx.planner.price import price
from phalanx.planner.software import SOFTWARE
from phalanx.report.tabular import Number, Table

_TERMS: Mapping[str, tuple[Term, ...]] = {
    "compute": ("forward", "backward"),
    "communication": ("communication",),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
}
"""Cause of a predicted time -> terms of the measured step that it corresponds to."""

_AGREEMENTS: Final = ("count", "clip", "metrics")
"""Phases whose few bytes a plan leaves out."""

UNMEASURED: Final = (
    "no time is predicted before phalanx bench ceiling --write this and phalanx bench comm --write "
    "this have measured this machine"
)
"""Sentence in place of a predicted time."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted and a measured value: seconds of a step, or bytes of memory."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error, predicted / measured - 1."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    def text(self, scale: float, unit: str) -> str:
        """Return both values divided by `scale`, in `unit`, with the error in percent."""
        both = f"{self.predicted / scale:,.4g} {unit}, measured {self.measured / scale:,.4g}"
        return f"{both} ({self.error:+.0%})"


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The planner's prediction of a run on this machine.

    Attributes:
        machine: source of the machine's rates; empty if they were not measured here.
        step_s: seconds of the median step; None without measured rates.
        time_s: cause -> seconds of a step; empty without measured rates.
        sent: mesh axis -> bytes that the first rank sends in a step.
        at_most: largest bytes of each kind of memory on rank 0.
        at_peak: bytes of each kind at rank 0's peak; their sum is the peak.
    """

    machine: str
    step_s: float | None
    time_s: Mapping[str, float]
    sent: Mapping[str, float]
    at_most: Mapping[Kind, int]
    at_peak: Mapping[Kind, int]

    @property
    def is_timed(self) -> bool:
        """Whether a time is predicted, because the rates and links were measured here."""
        return self.step_s is not None


@dataclass(frozen=True, kw_only=True)
class PredictionReport:
    """Predicted and measured values of a run.

    Attributes:
        machine: source of the machine's rates; empty if they were not measured here.
        is_timed: whether the rates and links were measured here, so that a time is predicted.
        time_s: `step` and each cause -> seconds; empty if not timed, or if the time is in doubt.
        sent: mesh axis -> bytes that rank 0 sends in a step; empty if not measured.
        bytes: on rank 0, `peak`, each kind at its largest, and `passing` -> bytes. `passing` is the
            largest sum of activations, casts and communication buffers; predicted, the largest
            casts + the largest activations.
        bytes_at_peak: bytes of each kind at rank 0's peak. The predicted ones sum to the predicted
            `peak`; the measured peak also has the kinds `communication` and `other`.
        errors: predicted / measured - 1 of each entry of `time_s` and `bytes`.
    """

    machine: str
    is_timed: bool
    time_s: Mapping[str, Forecast]
    sent: Mapping[str, Forecast]
    bytes: Mapping[str, Forecast]
    bytes_at_peak: Mapping[str, Forecast]
    errors: Mapping[str, float]

    def line(self) -> str:
        """Return step time and peak memory, predicted and measured, as text."""
        words = [f"{self.time_s['step'].text(1e-3, 'ms')} a step"] if self.time_s else []
        if self.bytes:
            words.append(f"{self.bytes['peak'].text(2**20, 'MiB')} at the peak")
        based = f"rates: {self.machine}" if self.is_timed else UNMEASURED
        return "; ".join([*words, based])

    def table(self) -> Table:
        """Return a table of the times by cause."""
        heads = [Number(f"{name} ms", ",.1f", 1e-3) for name in ("predicted", "median")]
        rows = [
            (cause, of.predicted, of.measured, of.error if of.measured else None)
            for cause, of in self.time_s.items()
        ]
        heads = ("cause", *heads, Number("error, %", "+.1f", 0.01))
        return Table("Time of a step, predicted and measured", heads, rows)


def predict(planned: PlannedStep[Any], machine: Calibration) -> Predicted:
    """Predict a run on this machine: bytes of memory, and the time if its rates were measured.

    Args:
        planned: a step of the run.
        machine: the measured rates and links of this machine.
    """
    num_ranks = planned.strategy.num_ranks
    held = memory(planned, machine.kind)[0]
    sizes = [(planned.microbatch, planned.seq_len)] * planned.accumulation
    kinds: dict[str, Any] = {"sent": sent_by_axis(planned.plan.traffic(sizes))}
    kinds |= {"at_most": kinds_of(held.causes), "at_peak": kinds_of(held.at_peak())}
    cluster = as_cluster(THIS, machine, num_ranks) if machine.is_whole(num_ranks) else None
    if cluster is None or not cluster.device.has_peak(planned.precision):
        return Predicted(machine="", step_s=None, time_s={}, **kinds)
    cost = price(planned, cluster, SOFTWARE["phalanx"])
    of_links = f"; links: {cluster.levels[0].link.source}" if num_ranks > 1 else ""
    return Predicted(
        machine=f"{cluster.device.source}, {cluster.device.date}{of_links}",
        step_s=cost.step_s,
        time_s={
            "compute": cost.compute_s,
            "communication": cost.tensor_s + cost.ring_s + cost.exposed_s,
            "bubble": cost.bubble_s,
            "optimizer": cost.optimizer_s,
        },
        **kinds,
    )


def sent_by_axis(entries: Iterable[Entry]) -> Counter[str]:
    """Return the bytes that a rank sends by mesh axis, without agreements between ranks."""
    found = Counter[str]()
    for entry in entries:
        if entry.phase not in _AGREEMENTS:
            found[entry.axis] += math.ceil(entry.sent_bytes)
    return found


def kinds_of(causes: Mapping[str, int]) -> dict[Kind, int]:
    """Return the bytes of each cause by the kinds of `MemoryLedger`."""
    return {
        "parameters": causes["weights"],
        "gathered": causes["gathered"],
        "cast": causes["casts"],
        "gradients": causes["gradients"],
        "optimizer": causes["optimizer"],
        "activations": causes["activations"] + causes["logits"],
    }


def judge(
    predicted: Predicted,
    steps: StepSummary | None,
    memory: MemoryReport | None,
    entries: Iterable[Entry] = (),
) -> PredictionReport | None:
    """Return a prediction with the measured values; None if nothing was measured."""
    time_s: dict[str, Forecast] = {}
    if predicted.step_s is not None and steps is not None and steps.doubt is None:
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
    measured = sent_by_axis(entries)
    sent = {
        axis: Forecast(predicted=predicted.sent.get(axis, 0), measured=num_bytes)
        for axis, num_bytes in measured.items()
    }
    errors = {name: each.error for name, each in {**time_s, **held}.items()}
    return PredictionReport(
        machine=predicted.machine,
        is_timed=predicted.is_timed,
        time_s=time_s,
        sent=sent,
        bytes=held,
        bytes_at_peak=at_peak,
        errors=errors,
    )
