"""What a run measured, put together at its end: values for scripts, and for the screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.console import RenderableType

from phalanx.checkpoint import manifest
from phalanx.comm.ledger import Entry
from phalanx.measure.logs import values_of
from phalanx.measure.memory_report import MemoryReport, resident_peak_bytes
from phalanx.measure.summary import StepSummary, advice, summarize
from phalanx.measure.utilization import Utilization
from phalanx.train.evaluate import Evaluation
from phalanx.train.report import result
from phalanx.train.report.prediction import Judged, judge, predict
from phalanx.train.report.records import Records
from phalanx.train.session import Session


@dataclass(frozen=True)
class Summary:
    """What a run measured.

    Attributes:
        run: what was run, in a line or two.
        steps_done: optimizer steps of the run, those before a resume too.
        num_steps: steps that this process took.
        seconds: that it took for them, with evaluations and checkpoints.
        steps: where the steps' time went; None if no step was taken.
        utilization: of the median step; None where it is not known.
        unit: what the mean loss is over: "tokens" or "samples", say.
        batches_per_s: global batches, of the median step.
        units_per_s: tokens (or samples) of the median step, over all ranks.
        losses: training loss of each of the latest steps of this process, 10,000 at most; of text
            in nats a token.
        evaluations: those on validation data, in their order.
        best: which of them is the best, in words; None if they were not judged.
        sent: what one rank sends in one step, as the ledger counted it.
        served_text: what the first worker sent parameter servers, and how late gradients were
            applied; None without servers.
        memory: what one rank holds in one step.
        no_memory: why there is no such account; None if there is.
        predicted: what the planner says of the run, beside what was measured; None if it cannot.
        resident_bytes: the most that rank 0's process has had in RAM.
        sample: the model's own text.
        paths: what was written, by name.
        resume: the command, or the Python, that trains as long again.
    """

    run: str
    steps_done: int
    num_steps: int
    seconds: float
    steps: StepSummary | None
    utilization: Utilization | None
    unit: str
    batches_per_s: float | None
    units_per_s: float | None
    losses: list[float]
    evaluations: list[Evaluation]
    best: str | None
    sent: list[Entry]
    served_text: str | None
    memory: MemoryReport | None
    no_memory: str | None
    predicted: Judged | None
    resident_bytes: int
    sample: str
    paths: Mapping[str, str]
    resume: str

    @property
    def go_on(self) -> str:
        """Deprecated since 0.2: `resume`; readers of the JSON document may still ask for it."""
        return self.resume

    @property
    def loss(self) -> float | None:
        """Training loss of the last step of this process."""
        return self.losses[-1] if self.losses else None

    @property
    def step_s(self) -> float | None:
        """Median wall time of a step."""
        is_timed = self.steps is not None and self.steps.doubt is None
        return self.steps.wall_s if self.steps is not None and is_timed else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the median step, over all ranks; None where samples are counted."""
        return self.units_per_s if self.unit == "tokens" else None

    @property
    def mfu(self) -> float | None:
        """MFU of the median step, of the data sheet of a GPU or the ceiling of a CPU."""
        if self.utilization is None:
            return None
        return self.utilization.mfu("ceiling" if self.utilization.peak is None else "data sheet")

    @property
    def checkpoint(self) -> str:
        """Folder of the last checkpoint; empty if none was written."""
        return self.paths.get("checkpoint", "")

    @property
    def bits_per_byte_first(self) -> float | None:
        """Of the first evaluation; None if it is not of text."""
        return self.evaluations[0].metrics.get("bits_per_byte") if self.evaluations else None

    @property
    def bits_per_byte_last(self) -> float | None:
        """Of the last evaluation; None if it is not of text."""
        return self.evaluations[-1].metrics.get("bits_per_byte") if self.evaluations else None

    @property
    def advice(self) -> str | None:
        """What would make a step shorter."""
        return None if self.steps is None else advice(self.steps, self.sent)

    def render(self, *, report: bool = False) -> RenderableType:
        """Return what a console shows of it, at most 100 columns; with `report` the tables too."""
        return result.render(self, report=report)


def summarize_run(records: Records) -> Summary:
    """Put together what the run measured; every rank calls this together."""
    session, times = records.session, records.measured()
    steps = summarize(times) if times else None
    is_timed = steps is not None and steps.doubt is None
    wall_s = steps.wall_s if steps is not None and is_timed else None
    memory, blind_spot = _memory(records), records.blind_spot or "it needs three steps"
    sample = session.sample()
    summary = Summary(
        run=session.title(),
        steps_done=session.step.steps_done,
        num_steps=records.num_steps,
        seconds=records.seconds,
        steps=steps,
        utilization=records.utilization() if is_timed else None,
        unit=session.unit,
        batches_per_s=None if wall_s is None else 1 / wall_s,
        units_per_s=None if wall_s is None else records.median_units / wall_s,
        losses=list(records.losses),
        evaluations=records.evaluations,
        best=None if session.best is None else session.best.text(),
        sent=records.entries,
        served_text=session.served_text(),
        memory=memory,
        no_memory=None if memory else f"No account of the memory by kind: {blind_spot}.",
        predicted=_judged(records, steps, memory),
        resident_bytes=memory.resident_bytes if memory is not None else resident_peak_bytes(),
        sample=sample,
        paths=_paths(session),
        resume=session.resume_command(2 * max(1, session.step.steps_done)),
    )
    if records.log is not None:
        values = values_of(summary)
        del values["losses"]  # each stands in the record of its step
        records.log.note("summary", values)
    return summary


def _memory(records: Records) -> MemoryReport | None:
    """Put what was measured beside what the strategy's layout says; all ranks call this."""
    account, session = records.memory, records.session
    if account is None:
        return None
    largest = torch.tensor(account.peak_bytes, device=session.comm.device)
    session.comm.all_reduce(largest, "job", "max")
    return MemoryReport(
        **vars(account),
        largest_bytes=int(largest),
        resident_bytes=resident_peak_bytes(),
    )


def _judged(
    records: Records, steps: StepSummary | None, memory: MemoryReport | None
) -> Judged | None:
    """Predict the run on the first rank, which alone reports it."""
    session = records.session
    planned = session.planned() if session.is_first else None
    if planned is None or session.config.compile:
        return None
    predicted = predict(planned, records.ceiling_flops_per_s)
    return None if predicted is None else judge(predicted, steps, memory)


def _paths(session: Session) -> dict[str, str]:
    """Return what was written, by name."""
    checkpoints = manifest.whole(session.out)
    paths = {
        **({"checkpoint": checkpoints[max(checkpoints)]} if checkpoints else {}),
        "metrics": session.out / "metrics.jsonl",
        "tensorboard": session.out / "tensorboard",
        **session.companions(),
    }
    return {name: str(path) for name, path in paths.items() if path.exists()}
