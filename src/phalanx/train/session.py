"""Set a job up on one rank: model, optimizer, data and what goes with them."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.text import Text

from phalanx.checkpoint import state
from phalanx.checkpoint.saver import Saver
from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.together import barrier, on_first_rank
from phalanx.data.loader import Loader, stream_length
from phalanx.data.samples import Samples
from phalanx.measure.environment import free_memory_bytes
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.parallel.plan import Plan, plan_decoder
from phalanx.train.job.resolve import Job, manifest_of
from phalanx.train.job.run_folder import check_unused, keep_origin
from phalanx.train.notice import said_if_long
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.precision import Precision, resolve
from phalanx.train.step import Step

RECOMPILE_LIMIT = 64
"""Graphs that a block may be compiled to."""


@dataclass
class Session:
    """What one rank works with; the job is the same on every rank.

    The blocks of the model may be compiled in place; `validation` has the samples kept aside.
    """

    job: Job
    comm: Ranks
    precision: Precision
    plan: Plan[Decoder]
    model: Decoder
    step: Step
    loader: Loader
    validation: Samples
    saver: Saver

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.comm.is_first

    def begin_save(self, *, is_passing: bool = False) -> None:
        """Begin to save a checkpoint, one that the next replaces if it `is_passing`.

        The run goes on meanwhile; every rank calls this together.

        Raises:
            CheckpointError: the one before could not be written.
        """
        step = self.step
        scaler = step.scaler.state_dict() or None  # empty where it is not enabled
        done = (step.steps_done, self.loader.consumed)
        about = manifest_of(self.job, *done, scaler=scaler, is_passing=is_passing)
        self.saver.begin(self.model, step.optimizer, about)


def open_session(job: Job) -> Session:
    """Build everything on this rank, and load the checkpoint that the job goes on from.

    Raises:
        PhalanxError: the strategy, precision or checkpoint does not fit.
    """
    config = job.config
    comm = Ranks(job.strategy, job.device)
    saver = Saver(
        job.out,
        keep=config.keep_checkpoints,
        timeout_s=config.timeout_s,
        num_stages=comm.size("pp"),
    )
    # Another run may have saved to it, and ended, since the job was resolved.
    on_first_rank(lambda: check_unused(job.out, job.start), f"cannot save in {job.out}")
    precision = resolve(config.precision, job.device)
    settled: dict[str, Any] = {"precision": precision.name, "out": str(job.out.absolute())}
    config = dataclasses.replace(config, **settled)
    job = dataclasses.replace(job, config=config)
    on_first_rank(lambda: keep_origin(job), f"cannot write to {job.out}")
    plan = plan_decoder(
        job.strategy, job.shape, precision.master, precision.compute, comm.coord("pp")
    )
    model = plan.model.train()
    with said_if_long("building the model"):
        fill = functools.partial(fill_initial, job.shape, config.seed)
        runner = plan.build(comm, fill)
    if job.init is not None:
        with said_if_long(f"reading weights from {job.init.folder}"):
            state.load_weights(job.init.folder, model)
    step = Step(
        model,
        build_optimizer(model, config.optimizer),
        NextToken(config.seed, job.shape.dropout),
        config.optimizer,
        comm=comm,
        num_steps=job.num_steps,
        run=runner,
        scaler=torch.amp.GradScaler(job.device) if precision.needs_scaler else None,
        nonfinite=config.nonfinite,
    )
    step.steps_done, consumed = job.done
    if job.start is not None:
        folder, about = job.start
        with said_if_long(f"reading {folder}"):
            state.load(folder, model, step.optimizer)
        if about.scaler is not None:
            step.scaler.load_state_dict(about.scaler)
    if config.compile:
        compile_blocks(model)
    _reserve(saver, step, comm)
    return Session(
        job=job,
        comm=comm,
        precision=precision,
        plan=plan,
        model=model,
        step=step,
        loader=_loader(job, comm, consumed),
        validation=dataclasses.replace(job.samples, file=job.tokens.validation),
        saver=saver,
    )


def _reserve(saver: Saver, step: Step, comm: Comm) -> None:
    """Get the memory that checkpoints are copied to; it would be too late after the last step."""
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free_bytes = free_memory_bytes("cpu") // num_here
    if not next(step.model.parameters()).is_cuda:  # gradients and moments will lie there, too
        free_bytes -= 3 * sum(local_shard(p).nbytes for p in step.model.parameters())
    barrier()  # all of a host have looked before one takes what it may
    line = saver.reserve(step.model, step.optimizer, free_bytes)
    if line is not None and comm.is_first:
        Console().print(Text(line), soft_wrap=True)


def compile_blocks(model: Decoder) -> None:
    """Compile each block, once for each size of a microbatch.

    A graph for any size may add up in another order than one for a fixed size, and which of them a
    batch meets depends on what the process has computed before: a resumed run would not go on to
    the bit. Sizes are few, but each comes with and without gradients and documents; beyond the
    limit Dynamo would go on uncompiled.
    """
    with suppress(ImportError):  # torch shows progress with tqdm where that is installed
        from tqdm import tqdm

        # Its own lock is a semaphore of the system, which a rank that leaves at once would leak.
        cast(Any, tqdm).set_lock(threading.RLock())
    dynamo_config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    for block in model.blocks:
        block.compile(dynamic=False)


def _loader(job: Job, comm: Comm, consumed: int) -> Loader:
    return Loader(
        job.samples,
        job.order,
        job.batch,
        comm.coord("data"),
        end=stream_length(job.order, job.config.epochs),
        tail=job.config.corpus.tail,
        consumed=consumed,
    )
