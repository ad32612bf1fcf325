"""The session of a decoder on text: model, optimizer, data and checkpoints on one rank."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from phalanx.account.flops import Flops, step_flops
from phalanx.account.parameters import num_parameters
from phalanx.account.planned import DecoderModel, PlannedStep, decoder_step
from phalanx.checkpoint import state
from phalanx.checkpoint.saver import Saver
from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.together import barrier, on_first_rank
from phalanx.data.loader import Loader, evaluation_batches, evaluation_rows, stream_length
from phalanx.data.samples import Batch
from phalanx.data.tokenizer import load_tokenizer
from phalanx.hugging_face.companions import TOKENIZER
from phalanx.measure.environment import free_memory_bytes
from phalanx.measure.peaks import Arithmetic
from phalanx.measure.products import arithmetic_in
from phalanx.models.decoder import Head
from phalanx.models.initial import fill_initial
from phalanx.parallel.compression.chosen import compress
from phalanx.parallel.plan import plan_decoder
from phalanx.parallel.skeleton import blocks_of
from phalanx.report.terminal import Terminal
from phalanx.train.best import BestTracker
from phalanx.train.callback import CallbackRunner, Callbacks
from phalanx.train.job.resolve import Job, manifest_of
from phalanx.train.job.run_folder import check_unused, keep_origin
from phalanx.train.notice import announce, notice_if_slow
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.precision import resolve
from phalanx.train.report.sample import opening, write_text
from phalanx.train.session import Session
from phalanx.train.step import Step, StepResult

RECOMPILE_LIMIT = 64
"""Most graphs that a block may be compiled to."""


class TextSession(Session):
    """A session that trains a decoder on text by a resolved job, which is equal on every rank.

    Attributes:
        job: the resolved run.
        precision: resolved dtypes.
        plan: plan that shards the model.
        model: this rank's shard of the model; its blocks may be compiled in place.
        data_rank: data-parallel rank, which selects the samples to train on.
        loader: loader of this rank's microbatches.
        validation: held-out samples.
    """

    unit = "tokens"
    step_type: type[Step] = Step

    def __init__(self, job: Job, extras: Callbacks | None = None) -> None:
        """Build model, step, saver and loader; load the checkpoint if the job resumes from one.

        Raises:
            PhalanxError: the strategy, precision or checkpoint does not fit.
        """
        shares_memory = job.config.shared_memory
        self.comm = Ranks(job.strategy.of_worker, job.device, shares_memory=shares_memory)
        self.data_rank = self.comm.coord("data")
        self._claim(job)
        with self.opening():
            self._open(job, extras)

    def _open(self, job: Job, extras: Callbacks | None) -> None:
        comm = self.comm
        self.precision = precision = resolve(job.config.precision, job.device)
        settled: dict[str, Any] = {"precision": precision.name, "out": str(job.out.absolute())}
        self.config = config = dataclasses.replace(job.config, **settled)
        self.job = job = dataclasses.replace(job, config=config)
        self.strategy, self.out = job.strategy, job.out
        self._keep_origin()
        self.plan = plan_decoder(
            job.strategy.of_worker, job.shape, precision.master, precision.compute, comm.coord("pp")
        )
        self.model = model = self.plan.model.train()
        with notice_if_slow("building the model"):
            fill = functools.partial(fill_initial, job.shape, config.seed)
            runner = self.plan.build(comm, fill)
        how = (config.compress, self.plan.strategy, precision.name)
        announce(compress(runner.reducer, *how, is_resumed=job.start is not None))
        if job.init is not None:
            with notice_if_slow(f"reading weights from {job.init.folder}"):
                found = state.load_weights(Path(str(config.init)), model)
            if found.name != job.init.folder.name:
                announce(f"read weights from {found}, which its run has saved meanwhile")
        self.step = self.step_type(
            model,
            self._optimizer(model),
            NextToken(config.seed, job.shape.dropout),
            config.optimizer,
            comm=comm,
            num_steps=job.num_steps,
            run=runner,
            scaler=torch.amp.GradScaler(job.device) if precision.needs_scaler else None,
            nonfinite=config.nonfinite,
        )
        self._call(extras or Callbacks())
        self.step.steps_done = job.done[0]
        if job.start is not None:
            with notice_if_slow(f"reading {job.start.folder}"):
                self.state.load(job.start)
        if config.compile:
            compile_blocks(model)
        _reserve(self.saver, self.step, comm)
        self.loader = loader_of(job, self.data_rank)
        self.validation = dataclasses.replace(job.samples, file=job.tokens.validation)
        self._num_rows = 0

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, self.job.config.optimizer)

    def _claim(self, job: Job) -> None:
        """Create the saver, which locks the folder of the run."""
        self.saver = Saver(
            job.out,
            keep=job.config.keep_checkpoints,
            num_stages=self.comm.size("pp"),
        )
        # Check again: another run may have saved there and ended since the job was resolved.
        with self.opening():
            on_first_rank(lambda: check_unused(job.out, job.start), f"cannot save in {job.out}")

    def _keep_origin(self) -> None:
        on_first_rank(lambda: keep_origin(self.job), f"cannot write to {self.job.out}")

    def _call(self, extras: Callbacks) -> None:
        self.called, self.log = CallbackRunner(extras, self.model), extras.log
        self.best = BestTracker.of(self.config)

    @property
    @override
    def num_steps(self) -> int:
        return self.job.num_steps

    @override
    def next_microbatches(self) -> Sequence[Batch]:
        before = self.loader.consumed
        microbatches = [batch.to(self.comm.device) for batch in next(self.loader)]
        self._num_rows = self.loader.consumed - before
        return microbatches

    @override
    def validation_batches(self) -> Iterable[Batch] | None:
        rows = self._validation_rows()
        if len(rows) == 0:
            return None
        batches = evaluation_batches(
            self.validation,
            rows,
            microbatch=self.job.batch.microbatch,
            rank=self.comm.coord("data"),
            num_ranks=self.comm.size("data"),
        )
        return (batch.to(self.comm.device) for batch in batches)

    @override
    def scores(self, loss_sum: float) -> Mapping[str, float]:
        token_bytes = self.job.tokens.token_bytes()
        num_bytes = self.validation.count_bytes(self._validation_rows(), token_bytes)
        return {"bits_per_byte": loss_sum / math.log(2) / num_bytes}

    def _validation_rows(self) -> Any:
        return evaluation_rows(len(self.validation), self.job.config.eval_samples)

    @override
    def begin_save(self, *, is_passing: bool = False) -> None:
        done = (self.step.steps_done, self.loader.consumed)
        self.state.begin_save(self.saver, manifest_of(self.job, *done, is_passing=is_passing))

    @property
    @override
    def num_rows(self) -> int:
        return self._num_rows

    @override
    def num_units(self, result: StepResult) -> int:
        return self._num_rows * self.job.config.corpus.seq_len

    @property
    @override
    def arithmetic(self) -> Arithmetic:
        found = arithmetic_in(self.precision.compute, self.comm.device)
        assert found is not None, "products of every precision are measured"
        return found

    @override
    def flops(self, num_rows: int | None = None) -> tuple[Flops, Flops]:
        num_rows = num_rows or self.job.batch.global_size
        sizes = (self.job.shape, self.job.config.corpus.seq_len, num_rows)
        recompute = self.strategy.recompute
        return step_flops(*sizes, "causal", recompute), step_flops(*sizes, "full", recompute)

    @override
    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self.job.config)

    @override
    def remarks(self) -> list[str]:
        start = self.job.start
        return [] if start is None else self.called.registered.remarks_on(start.about.registered)

    @override
    def title(self) -> str:
        return (
            f"{self.job.name} ({num_parameters(self.job.shape).total:,} parameters), "
            f"{self.strategy} on {self.job.device}, {self.precision.name}, {self.job.batch}, "
            f"{self.step.steps_done} steps"
        )

    @override
    def planned(self) -> PlannedStep[DecoderModel]:
        job = self.job
        return decoder_step(
            shape=job.shape,
            strategy=job.strategy,
            seq_len=job.config.corpus.seq_len,
            microbatch=job.batch.microbatch,
            accumulation=job.batch.accumulation,
            precision=self.precision.name,
            has_documents=job.config.corpus.document_mask,
        )

    @override
    def sample(self) -> str:
        job = self.job
        tokenizer = load_tokenizer(job.tokens.tokenizer)
        prompt = job.config.prompt
        if prompt is None:
            prompt = opening(job.tokens, tokenizer)
        # Eager, because each text length would be compiled. `set_stance` imports the compiler, so
        # it is called only if the run compiles.
        is_eager = torch.compiler.set_stance("force_eager") if job.config.compile else nullcontext()
        with notice_if_slow("the model writes a sample"), is_eager:
            return write_text(
                self.model,
                self.step.run,
                tokenizer,
                prompt,
                first_id=job.tokens.train.end_id,
                seed=job.config.seed,
            )

    @override
    def companions(self) -> Mapping[str, Path]:
        return {"tokenizer": self.out / TOKENIZER}

    @override
    def resume_command(self, steps: int | None = None) -> str:
        more = "" if steps is None else f" --steps {steps}"
        return f"phalanx train --resume {shlex.quote(str(self.out))}{more}"

    @override
    def close(self) -> None:
        self.loader.close()


def _reserve(saver: Saver, step: Step, comm: Comm) -> None:
    """Reserve the saver's host memory before the first step, while the memory is still free."""
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free_bytes = free_memory_bytes("cpu") // num_here
    if not next(step.model.parameters()).is_cuda:  # keep room for gradients and 2 moments
        free_bytes -= 3 * sum(local_shard(p).nbytes for p in step.model.parameters())
    barrier()  # all ranks of a host read the free memory before any rank allocates
    line = saver.reserve(step.model, step.optimizer, free_bytes)
    if line is not None and comm.is_first:
        Terminal().say(line)


def compile_blocks(model: nn.Module) -> None:
    """Compile each block and a decoder's loss, or a model without blocks as a whole.

    Each microbatch size gets its own graph (`dynamic=False`). A dynamic-shape graph may sum in
    another order than a static one, and which of them Dynamo uses for a batch depends on earlier
    batches, so a resumed run would not match bit for bit. There are few sizes, but each is compiled
    with and without gradients and documents; beyond RECOMPILE_LIMIT, Dynamo would run eagerly.
    """
    with suppress(ImportError):  # torch shows progress with tqdm if it is installed
        from tqdm import tqdm

        # Replace tqdm's lock, a system semaphore, which a rank that exits abruptly would leak.
        cast(Any, tqdm).set_lock(threading.RLock())
    dynamo_config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    for block in [block for _, block in blocks_of(model)] or [model]:
        block.compile(dynamic=False)
    for module in model.modules():
        if isinstance(module, Head):
            module.compiles_loss = True


def loader_of(job: Job, data_rank: int) -> Loader:
    """Return the loader of a data-parallel rank, at the position where the job starts."""
    return Loader(
        job.samples,
        job.order,
        job.batch,
        data_rank,
        end=stream_length(job.order, job.config.epochs),
        tail=job.config.corpus.tail,
        consumed=job.done[1],
    )
