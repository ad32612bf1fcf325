"""Compare the planner's prediction of a run's step time and memory with the measurement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.account.planned import PlannedStep
from phalanx.account.rank_memory import memory as stage_memory
from phalanx.comm.ledger import Entry
from phalanx.measure.memory import Kind
from phalanx.measure.memory_report import MemoryReport
from phalanx.measure.summary import StepSummary
from phalanx.planner.calibration import as_cluster
from phalanx.planner.calibration_file import THIS, Calibration
from phalanx.planner.price import price
from phalanx.planner.software import SOFTWARE
from phalanx.report.tabular import Number, Table

_AGREEMENTS: Final = ("count", "clip", "metrics")
"""Phases whose few bytes a plan leaves out."""

UNMEASURED: Final = (
    "no time is predicted before a CPU run of 20 steps, or phalanx bench ceiling --write this and "
    "phalanx bench comm --write this, have measured this machine"
)
"""Sentence in place of a predicted time."""


@dataclass(frozen=True)
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


def predict(
    planned: PlannedStep[Any],
    machine: Calibration,
    steps: StepSummary | None = None,
    memory: MemoryReport | None = None,
    entries: Iterable[Entry] = (),
) -> PredictionReport | None:
    """Predict a run on this machine, beside what was measured; None if nothing was measured.

    Args:
        planned: a step of the run.
        machine: the measured rates and links of this machine; without any, no time is predicted.
        steps: measured times.
        memory: measured memory of rank 0.
        entries: measured collectives of rank 0 in a step.
    """
    num_ranks, source, time_s = planned.strategy.num_ranks, "", dict[str, Forecast]()
    cluster = as_cluster(THIS, machine, num_ranks) if machine.is_whole(num_ranks) else None
    if cluster is not None and cluster.device.has_peak(planned.precision):
        of_links = f"; links: {cluster.levels[0].link.source}" if num_ranks > 1 else ""
        source = f"{cluster.device.source}, {cluster.device.date}{of_links}"
        if steps is not None and steps.doubt is None:
            cost, medians_s = price(planned, cluster, SOFTWARE["phalanx"]), steps.medians_s
            computed_s = medians_s["forward"] + medians_s["backward"]
            sent_s = cost.tensor_s + cost.ring_s + cost.exposed_s
            time_s = {
                "step": Forecast(cost.step_s, steps.wall_s),
                "compute": Forecast(cost.compute_s, computed_s),
                "communication": Forecast(sent_s, medians_s["communication"]),
                "bubble": Forecast(cost.bubble_s, medians_s["bubble"]),
                "optimizer": Forecast(cost.optimizer_s, medians_s["optimizer"]),
            }
    held, at_peak = dict[str, Forecast](), dict[str, Forecast]()
    if memory is not None and memory.doubt is None:
        stage = stage_memory(planned, machine.kind)[0]
        most, kinds = kinds_of(stage.causes), kinds_of(stage.at_peak())
        passing = most["cast"] + most["activations"]
        held = {
            "peak": Forecast(sum(kinds.values()), memory.peak_bytes),
            "passing": Forecast(passing, memory.passing_bytes),
            **{kind: Forecast(each, memory.at_most[kind]) for kind, each in most.items()},
        }
        at_peak = {kind: Forecast(each, memory.at_peak[kind]) for kind, each in kinds.items()}
    if not time_s and not held:
        return None
    sizes = [(planned.microbatch, planned.seq_len)] * planned.accumulation
    expected = _sent_by_axis(planned.plan.traffic(sizes))
    measured = _sent_by_axis(entries)
    return PredictionReport(
        machine=source,
        is_timed=bool(source),
        time_s=time_s,
        sent={axis: Forecast(expected[axis], of) for axis, of in measured.items()},
        bytes=held,
        bytes_at_peak=at_peak,
        errors={name: each.error for name, each in {**time_s, **held}.items()},
    )


def _sent_by_axis(entries: Iterable[Entry]) -> Counter[str]:
    """Return the bytes that a rank sends by mesh axis, without agreements between ranks."""
    sent = Counter[str]()
    for entry in entries:
        if entry.phase not in _AGREEMENTS:
            sent[entry.axis] += math.ceil(entry.sent_bytes)
    return sent


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
