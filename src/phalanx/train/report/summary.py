"""What a run measured, put together at its end: values for scripts, and for the screen."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from rich.console import RenderableType

from phalanx.checkpoint import manifest
from phalanx.comm.ledger import Entry
from phalanx.data.tokenizer import load_tokenizer
from phalanx.hugging_face.companions import TOKENIZER
from phalanx.measure.logs import values_of
from phalanx.measure.memory_report import MemoryReport, predicted_bytes, resident_peak_bytes
from phalanx.measure.summary import StepSummary, advice, summarize
from phalanx.measure.utilization import Utilization
from phalanx.planner.activations import activations
from phalanx.planner.model_shape import num_parameters
from phalanx.planner.stages import held_of
from phalanx.train.notice import said_if_long
from phalanx.train.report import result
from phalanx.train.report.records import Records
from phalanx.train.report.sample import opening, write_text


@dataclass(frozen=True)
class Summary:
    """What a run measured.

    Attributes:
        run: what was run, in a line or two.
        num_steps: steps that this process took.
        seconds: that it took for them, with evaluations and checkpoints.
        steps: where the steps' time went; None if no step was taken.
        utilization: of the median step.
        tokens_per_s: of the median step, over all ranks.
        batches_per_s: global batches, of the median step.
        loss: training loss of the last step, in nats a token.
        bits_per_byte_first: of the first measurement; None without validation text.
        bits_per_byte_last: of the last.
        sent: what one rank sends in one step, as the ledger counted it.
        sent_text: what HSDP sends within its groups and across them; None for other strategies.
        memory: what one rank holds in one step.
        no_memory: why there is no such account; None if there is.
        resident_bytes: the most that rank 0's process has had in RAM.
        sample: the model's own text.
        paths: what was written, by name.
        go_on: the command that trains as long again.
    """

    run: str
    num_steps: int
    seconds: float
    steps: StepSummary | None
    utilization: Utilization | None
    tokens_per_s: float | None
    batches_per_s: float | None
    loss: float | None
    bits_per_byte_first: float | None
    bits_per_byte_last: float | None
    sent: list[Entry]
    sent_text: str | None
    memory: MemoryReport | None
    no_memory: str | None
    resident_bytes: int
    sample: str
    paths: dict[str, str]
    go_on: str

    @property
    def advice(self) -> str | None:
        """What would make a step shorter."""
        return None if self.steps is None else advice(self.steps, self.sent)

    def render(self, *, report: bool = False) -> RenderableType:
        """Return what a console shows of it, at most 100 columns; with `report` the tables too."""
        return result.render(self, report=report)


def summarize_run(records: Records) -> Summary:
    """Put together what the run measured; every rank calls this together."""
    session, job = records.session, records.session.job
    times = records.measured()
    scores = [evaluation.bits_per_byte for evaluation in records.evaluations]
    steps = summarize(times) if times else None
    is_timed = steps is not None and steps.doubt is None
    wall_s = steps.wall_s if steps is not None and is_timed else None
    step_tokens = job.batch.global_size * job.config.corpus.seq_len
    memory, blind_spot = _memory(records), records.blind_spot or "it needs three steps"
    sample = _sample(records)
    master_bytes = num_parameters(job.shape).total * session.precision.master.itemsize
    summary = Summary(
        run=(
            f"{job.name} ({num_parameters(job.shape).total:,} parameters), {job.strategy} on "
            f"{job.device}, {session.precision.name}, {job.batch}, "
            f"{session.step.steps_done} steps"
        ),
        num_steps=records.num_steps,
        seconds=records.seconds,
        steps=steps,
        utilization=records.utilization() if is_timed else None,
        tokens_per_s=None if wall_s is None else step_tokens / wall_s,
        batches_per_s=None if wall_s is None else 1 / wall_s,
        loss=records.last.loss if records.last is not None else None,
        bits_per_byte_first=next(iter(scores), None),
        bits_per_byte_last=next(reversed(scores), None),
        sent=records.entries,
        sent_text=result.hsdp_text(records.entries, job.strategy, master_bytes),
        memory=memory,
        no_memory=None if memory else f"No account of the memory by kind: {blind_spot}.",
        resident_bytes=memory.resident_bytes if memory is not None else resident_peak_bytes(),
        sample=sample,
        paths=_paths(records),
        go_on=(
            f"phalanx train --resume {shlex.quote(str(job.out))} "
            f"--steps {2 * max(1, session.step.steps_done)}"
        ),
    )
    if records.log is not None:
        records.log.note("summary", values_of(summary))
    return summary


def _memory(records: Records) -> MemoryReport | None:
    """Put what was measured beside what the strategy's layout says; all ranks call this."""
    account, session, job = records.memory, records.session, records.session.job
    if account is None:
        return None
    largest = torch.tensor(account.peak_bytes, device=session.comm.device)
    session.comm.all_reduce(largest, "job", "max")
    predicted = predicted_bytes(session.plan.holds(job.batch.accumulation))
    of_one = activations(
        job.shape,
        job.strategy,
        job.config.corpus.seq_len,
        job.batch.microbatch,
        session.precision.name,
        device="cuda" if session.comm.device.type == "cuda" else "cpu",
        has_documents=job.config.corpus.document_mask,
        has_casts=False,  # they have a row of their own
    )
    predicted["activations"] = held_of(
        job.strategy, job.shape, of_one, job.batch.accumulation, session.comm.coord("pp")
    )
    return MemoryReport(
        **vars(account),
        predicted=predicted,
        largest_bytes=int(largest),
        resident_bytes=resident_peak_bytes(),
    )


def _paths(records: Records) -> dict[str, str]:
    """Return what was written, by name; a run that had nothing left to do saved no checkpoint."""
    job = records.session.job
    paths = {
        "checkpoint": manifest.folder_of(job.out, records.session.step.steps_done),
        "metrics": job.out / "metrics.jsonl",
        "tensorboard": job.out / "tensorboard",
        "tokenizer": job.out / TOKENIZER,
    }
    return {name: str(path) for name, path in paths.items() if path.exists()}


def _sample(records: Records) -> str:
    job = records.session.job
    tokenizer = load_tokenizer(job.tokens.tokenizer)
    prompt = job.config.prompt
    if prompt is None:
        prompt = opening(job.tokens, tokenizer)
    # Each length of the text would be compiled anew; asking for it costs the compiler's import.
    is_eager = torch.compiler.set_stance("force_eager") if job.config.compile else nullcontext()
    with said_if_long("the model writes a sample"), is_eager:
        return write_text(
            records.session.model,
            records.session.step.run,
            tokenizer,
            prompt,
            first_id=job.tokens.train.end_id,
            seed=job.config.seed,
        )
