"""What a run measured, put together at its end: values for scripts, tables for people."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.checkpoint import manifest
from phalanx.checkpoint.companions import TOKENIZER
from phalanx.comm.ledger import Entry
from phalanx.comm.primitives import all_reduce, barrier
from phalanx.data.tokenizer import load_tokenizer
from phalanx.launch.local import num_cores
from phalanx.measure.memory_report import MemoryReport, predicted_bytes, resident_peak_bytes
from phalanx.measure.summary import StepSummary, advice, summarize, summary_table
from phalanx.measure.utilization import Utilization
from phalanx.models.decoder import Decoder
from phalanx.parallel import compose
from phalanx.planner.activations import activations
from phalanx.planner.model_shape import num_parameters
from phalanx.train.observer import Observer
from phalanx.train.sample import write_text

PROMPT = "def "


@dataclass(frozen=True)
class Summary:
    """What a run measured.

    Attributes:
        text: what was run, in a line or two.
        steps: where the steps' time went; None if no step was taken.
        utilization: of the median step.
        tokens_per_s: of the median step, over all ranks.
        speed_up: over one process with all cores (or one GPU) for the same global batch; None but
            for dp alone, where every rank holds the whole model.
        loss: training loss of the last step, in nats a token.
        bits_per_byte: validation, first and last measurement; None without validation text.
        sent: what one rank sends in one step, as the ledger counted it.
        memory: what one rank holds in one step; None if fewer than three were taken.
        sample: the model's own text.
        paths: what was written, by name.
    """

    text: str
    steps: StepSummary | None
    utilization: Utilization | None
    tokens_per_s: float | None
    speed_up: float | None
    loss: float | None
    bits_per_byte: tuple[float, float] | None
    sent: list[Entry]
    memory: MemoryReport | None
    sample: str
    paths: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "run": self.text,
            "steps": None if self.steps is None else self.steps.as_dict(),
            "advice": self.advice(),
            "utilization": None if self.utilization is None else self.utilization.as_dict(),
            "tokens_per_s": self.tokens_per_s,
            "speed_up": self.speed_up,
            "loss": self.loss,
            "bits_per_byte_first": None if self.bits_per_byte is None else self.bits_per_byte[0],
            "bits_per_byte_last": None if self.bits_per_byte is None else self.bits_per_byte[1],
            "sent": [dataclasses.asdict(entry) for entry in self.sent],
            "memory": None if self.memory is None else self.memory.as_dict(),
            "sample": self.sample,
            "paths": self.paths,
        }

    def advice(self) -> str | None:
        """Return what would make a step shorter."""
        if self.steps is None:
            return None
        sends_inside = any(entry.phase == "forward" for entry in self.sent)
        return advice(self.steps, sends_inside=sends_inside)

    def render(self) -> RenderableType:
        """Return tables and lines for a console, at most 100 columns."""
        parts: list[RenderableType] = [Text()]
        if self.steps is not None and self.utilization is not None:
            parts += [summary_table(self.steps), Text(self.advice() or ""), Text()]
            if self.sent:
                parts += [_sent_table(self.sent), Text()]
            if self.memory is not None:
                parts += [self.memory.table(), Text(self.memory.text()), Text()]
            parts += [Text(self.utilization.text()), Text()]
        parts += [Text(line) for line in self._results()]
        parts += [Text(), Text("The model writes:"), Text(self.sample, style="italic"), Text()]
        parts += [Text(f"{name:<12} {path}") for name, path in self.paths.items()]
        return Group(*parts)

    def _results(self) -> list[str]:
        lines = [self.text]
        if self.tokens_per_s is not None:
            line = f"{self.tokens_per_s:,.0f} tokens/s"
            if self.speed_up is not None:
                line += f", {self.speed_up:.2f}x one process on the same cores or on one GPU"
            lines.append(line)
        if self.loss is not None:
            lines.append(f"training loss of the last step {self.loss:.4f} nats a token")
        if self.bits_per_byte is not None:
            first, last = self.bits_per_byte
            lines.append(
                f"validation {first:.3f} -> {last:.3f} bits per byte, {last / first:.2f} of where "
                "this run began"
            )
        return lines


def summarize_run(observer: Observer) -> Summary:
    """Put together what the run measured; every rank calls this together."""
    session, job = observer.session, observer.session.job
    times = observer.measured()
    speed_up = None
    if times and 1 < job.strategy.num_ranks == job.strategy.dp.degree:
        step_s = statistics.median(t.wall_s for t in times)
        speed_up = _time_alone_s(observer) / step_s
    scores = [evaluation.bits_per_byte for _, evaluation in observer.evaluations]
    steps = summarize(times) if times else None
    summary = Summary(
        text=(
            f"{job.name} ({num_parameters(job.shape).total:,} parameters), {job.strategy} on "
            f"{job.device}, {session.precision.name}, {job.batch}, "
            f"{session.trainer.steps_done} steps"
        ),
        steps=steps,
        utilization=observer.utilization() if times else None,
        tokens_per_s=observer.step_tokens / steps.wall_s if steps is not None else None,
        speed_up=speed_up,
        loss=observer.last.loss if observer.last is not None else None,
        bits_per_byte=(scores[0], scores[-1]) if scores else None,
        sent=observer.entries,
        memory=_memory(observer),
        sample=_sample(observer),
        paths=_paths(observer),
    )
    observer.note("summary", summary.as_dict())
    return summary


def _memory(observer: Observer) -> MemoryReport | None:
    """Put what was measured beside what the strategy's layout says; all ranks call this."""
    account, session, job = observer.memory, observer.session, observer.session.job
    if account is None:
        return None
    largest = torch.tensor(account.peak_bytes, device=session.device)
    for axis in session.mesh.mesh_dim_names or ():
        all_reduce(largest, session.mesh, axis, "max")
    with torch.device("meta"):
        model = Decoder(job.shape).to(dtype=session.precision.master)
    holding = compose.layout(
        model,
        job.strategy,
        compute=session.precision.compute,
        accumulation=job.batch.accumulation,
    )
    predicted = predicted_bytes(holding)
    predicted["activations"] = activations(
        job.shape,
        job.config.corpus.seq_len,
        job.batch.microbatch,
        session.precision.name,
        job.strategy.recompute,
        device="cuda" if session.device.type == "cuda" else "cpu",
        has_documents=job.config.corpus.document_mask,
        has_casts=False,  # they have a row of their own
        tp=job.strategy.tp,
    ).peak
    return MemoryReport(account, predicted, int(largest), resident_peak_bytes())


def _time_alone_s(observer: Observer) -> float:
    """Measure what one process would need for the same global batch, while the others wait.

    It is the forward and backward of one microbatch by rank 0 with all cores of the host, times the
    microbatches of the global batch, plus the optimizer's median time.
    """
    session, job = observer.session, observer.session.job
    barrier()
    seconds = 0.0
    if session.is_first:
        num_threads = torch.get_num_threads()
        if job.device == "cpu":
            torch.set_num_threads(num_cores())
        batch = session.loader.step_at(0)[0].to(session.device)
        seconds = min(_forward_backward_s(observer, batch) for _ in range(3))
        torch.set_num_threads(num_threads)
        session.trainer.optimizer.zero_grad(set_to_none=True)
    barrier()
    optimizer_s = statistics.median(times.optimizer_s for times in observer.measured())
    return seconds * job.batch.accumulation * job.batch.num_data_ranks + optimizer_s


def _forward_backward_s(observer: Observer, batch: Any) -> float:
    session = observer.session
    # The gradients are dropped; autograd.grad fires none of the hooks that reduce.
    parameters = list(session.model.parameters())
    _wait_for(session.device)
    begin_s = time.perf_counter()
    loss = session.trainer.objective.loss_sum(session.model, batch, 0)
    torch.autograd.grad(loss, parameters)
    _wait_for(session.device)
    return time.perf_counter() - begin_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _paths(observer: Observer) -> dict[str, str]:
    """Return what was written, by name; a run that had nothing left to do saved no checkpoint."""
    job = observer.session.job
    paths = {
        "checkpoint": manifest.folder_of(job.out, observer.session.trainer.steps_done),
        "metrics": job.out / "metrics.jsonl",
        "tensorboard": job.out / "tensorboard",
        "tokenizer": job.out / TOKENIZER,
    }
    return {name: str(path) for name, path in paths.items() if path.exists()}


def _sample(observer: Observer) -> str:
    job = observer.session.job
    return write_text(
        observer.session.model,
        load_tokenizer(job.tokens.tokenizer),
        PROMPT,
        first_id=job.tokens.train.end_id,
        seed=job.config.seed,
    )


def _sent_table(entries: list[Entry]) -> Table:
    table = Table(title="What one rank sends in a step", title_justify="left")
    for name in ("phase", "axis", "collective"):
        table.add_column(name)
    for name in ("calls", "payload MiB", "sent MiB"):
        table.add_column(name, justify="right")
    for entry in entries:
        table.add_row(
            entry.phase,
            entry.axis,
            entry.op,
            str(entry.calls),
            f"{entry.payload_bytes / 2**20:.3f}",
            f"{entry.sent_bytes / 2**20:.3f}",
        )
    return table
