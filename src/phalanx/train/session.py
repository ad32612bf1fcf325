"""Set a job up on one rank: model, optimizer, data and what goes with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.checkpoint import state
from phalanx.checkpoint.agree import agree_on_first
from phalanx.checkpoint.saver import Saver
from phalanx.data.loader import Loader, stream_length
from phalanx.data.order import Order
from phalanx.data.samples import Samples
from phalanx.mesh import build_mesh, data_coordinate, device_of
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.parallel.compose import parallelize
from phalanx.train.job import Job, manifest_of
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.precision import Precision, resolve
from phalanx.train.run_folder import check_unused, keep_origin
from phalanx.train.step import Trainer


@dataclass
class Session:
    """What one rank works with.

    Attributes:
        job: the job, the same on every rank.
        mesh: the ranks by axis.
        device: of this rank.
        precision: data types.
        model: the decoder; its blocks may be compiled in place.
        trainer: takes the steps.
        loader: gives the microbatches.
        validation: samples kept aside.
        saver: writes checkpoints while the run goes on.
    """

    job: Job
    mesh: DeviceMesh
    device: torch.device
    precision: Precision
    model: Decoder
    trainer: Trainer
    loader: Loader
    validation: Samples
    saver: Saver

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return dist.get_rank() == 0

    def begin_save(self, *, is_passing: bool = False) -> None:
        """Begin to save a checkpoint while the run goes on; every rank calls this together.

        Args:
            is_passing: whether the next checkpoint replaces it.

        Raises:
            CheckpointError: the one before could not be written.
        """
        scaler = self.trainer.scaler
        about = manifest_of(
            self.job,
            self.trainer.steps_done,
            self.loader.consumed,
            scaler=None if scaler is None else scaler.state_dict(),
        )
        about = dataclasses.replace(about, is_passing=is_passing)
        self.saver.begin(self.model, self.trainer.optimizer, about)


def open_session(job: Job) -> Session:
    """Build everything on this rank, and load the checkpoint that the job goes on from.

    Raises:
        PhalanxError: the strategy, precision or checkpoint does not fit.
    """
    config = job.config
    mesh = build_mesh(job.strategy, job.device)
    device = device_of(mesh)
    saver = Saver(job.out, keep=config.keep_checkpoints)
    # Another run may have saved to it, and ended, since the job was resolved.
    agree_on_first(lambda: check_unused(job.out, job.start), f"cannot save in {job.out}")
    precision = resolve(config.precision, job.device)
    settled: dict[str, Any] = {"precision": precision.name, "out": str(job.out.absolute())}
    config = dataclasses.replace(config, **settled)
    job = dataclasses.replace(job, config=config)
    agree_on_first(lambda: keep_origin(job), f"cannot write to {job.out}")
    with torch.device("meta"):
        model = Decoder(job.shape).to(dtype=precision.master)
    model.compute_dtype = precision.compute
    model.train()
    reducer = parallelize(
        model,
        job.strategy,
        mesh,
        compute=precision.compute,
        first_weights=lambda part, name, whole, offset: fill_initial(
            part, job.shape, name, config.seed, whole=whole, offset=offset
        ),
    )
    if job.init is not None:
        state.load_weights(job.init, model)
    trainer = Trainer(
        model,
        build_optimizer(model, config.optimizer),
        NextToken(config.seed, job.shape.dropout),
        config.optimizer,
        mesh=mesh,
        num_steps=job.num_steps,
        reducer=reducer,
        scaler=torch.amp.GradScaler(job.device) if precision.needs_scaler else None,
        nonfinite=config.nonfinite,
    )
    consumed = 0
    if job.start is not None:
        folder, about = job.start
        state.load(folder, model, trainer.optimizer)
        if trainer.scaler is not None and about.scaler is not None:
            trainer.scaler.load_state_dict(about.scaler)
        trainer.steps_done, consumed = about.steps_done, about.consumed
    if config.compile:
        for block in model.blocks:
            block.compile()
    return Session(
        job=job,
        mesh=mesh,
        device=device,
        precision=precision,
        model=model,
        trainer=trainer,
        loader=_loader(job, mesh, consumed),
        validation=_validation(job),
        saver=saver,
    )


def _loader(job: Job, mesh: DeviceMesh, consumed: int) -> Loader:
    corpus = job.config.corpus
    samples = Samples(job.tokens.train, corpus.seq_len, document_mask=corpus.document_mask)
    return Loader(
        samples,
        Order(len(samples), job.config.seed, corpus.shuffle),
        job.batch,
        data_coordinate(mesh)[0],
        end=stream_length(len(samples), job.config.epochs),
        tail=corpus.tail,
        consumed=consumed,
    )


def _validation(job: Job) -> Samples:
    corpus = job.config.corpus
    return Samples(job.tokens.validation, corpus.seq_len, document_mask=corpus.document_mask)
