"""The session of a decoder on text: tokenizer, token stream, first weights, bits per byte."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from phalanx.account.flops import Flops, step_flops
from phalanx.account.parameters import num_parameters
from phalanx.account.planned import DecoderModel, PlannedStep, decoder_step
from phalanx.checkpoint import state
from phalanx.checkpoint.adapters import FOLDER
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.run_state import Stateful
from phalanx.checkpoint.weights import Weights, base_in, open_checkpoint
from phalanx.comm.comm import local_shard
from phalanx.comm.together import barrier, on_first_rank
from phalanx.data.loader import Loader, evaluation_batches, evaluation_rows, stream_length
from phalanx.data.samples import Batch
from phalanx.data.tokenizer import load_tokenizer
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.convert import checksum_of, names_of, open_weights
from phalanx.hugging_face.folder import is_hugging_face
from phalanx.hugging_face.peft_folder import CONFIG, write_peft
from phalanx.infer.served import fill_from
from phalanx.measure.environment import free_memory_bytes
from phalanx.measure.peaks import Arithmetic
from phalanx.measure.products import arithmetic_in
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.object_store import path_of
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.plan import FirstWeights, plan_decoder
from phalanx.report.terminal import Terminal
from phalanx.storage import new_folder, remove_folder
from phalanx.train.callback import Callbacks
from phalanx.train.job.resolve import Job, manifest_of
from phalanx.train.job.run_folder import keep_origin
from phalanx.train.notice import announce, notice_if_slow
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.precision import resolve
from phalanx.train.preference import Preference, Reference
from phalanx.train.report.sample import opening, write_text
from phalanx.train.session import Session
from phalanx.train.step import StepResult


class TextSession(Session):
    """A session that trains a decoder on text by a resolved job, which is equal on every rank.

    Attributes:
        job: the resolved run.
        precision: resolved dtypes.
        loader: loader of this rank's microbatches.
        validation: held-out samples.
    """

    unit, command = "tokens", "phalanx train --resume"

    def __init__(self, job: Job, extras: Callbacks | None = None) -> None:
        """Open the session of a job.

        Raises:
            PhalanxError: the strategy, precision or checkpoint does not fit.
        """
        self.precision = precision = resolve(job.config.precision, job.device)
        settled: dict[str, Any] = {"precision": precision.name, "out": str(job.out.absolute())}
        config = dataclasses.replace(job.config, **settled)
        self.job = job = dataclasses.replace(job, config=config)
        self.start = job.start
        self.global_rows = job.batch.global_size
        self.validation = dataclasses.replace(job.samples, file=job.tokens.validation)
        how = (config.seed, job.shape.dropout)
        objective = Preference(*how, config.dpo.beta) if job.has_pairs else NextToken(*how)
        self.reference = Reference(objective) if isinstance(objective, Preference) else None
        if job.has_pairs:
            self.unit = "pairs"
        super().__init__(
            job.strategy,
            config,
            job.out,
            extras or Callbacks(),
            precision=precision,
            objective=objective,
            updates=config.optimizer,
            num_rated_steps=job.num_steps,
        )

    @property
    def model(self) -> Decoder:
        """This rank's shard of the model; its blocks may be compiled in place."""
        return self.plan.model

    @property
    def data_rank(self) -> int:
        """Data-parallel rank, which selects the samples to train on."""
        return self.comm.coord("data")

    @override
    def claim(self) -> None:
        super().claim()
        on_first_rank(lambda: keep_origin(self.job), f"cannot write to {self.out}")

    @override
    def build(self) -> Runner:
        job, comm, precision = self.job, self.comm, self.precision
        dtypes = (precision.master, precision.compute)
        self.plan = plan_decoder(job.strategy.of_worker, job.shape, *dtypes, comm.coord("pp"))
        self.model.train()
        with notice_if_slow("building the model"):
            fill: FirstWeights = functools.partial(fill_initial, job.shape, job.config.seed)
            if self.start is not None:  # the checkpoint has all trained weights
                fill = _keep
            elif job.published is not None and job.shape.lora is None:
                fill = fill_from(open_weights(job.published))
            self.base = base_of(job)
            if self.base is not None:
                trained, frozen = fill, fill_from(self.base.weights)

                def fill_both(shard: Tensor, name: str, *size: tuple[int, ...]) -> object:
                    return (trained if ".lora_" in name else frozen)(shard, name, *size)

                fill = fill_both
                self.saver.after_publish = self.base.write_adapters
            runner = self.plan.build(comm, fill)
        if job.init is not None and self.base is None:
            with notice_if_slow(f"reading weights from {job.init.folder}"):
                read = state.load_weights(path_of(str(job.config.init)), self.model)
            if read.name != job.init.folder.name:
                announce(f"read weights from {read}, which its run has saved meanwhile")
        return runner

    @override
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, self.job.config.optimizer, self.comm)

    @override
    def open_stream(self) -> Loader:
        # Reserve the saver's host memory before the first step, while the memory is still free.
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free_bytes = free_memory_bytes("cpu") // num_here
        if self.comm.device.type == "cpu":  # keep room for gradients and 2 moments
            free_bytes -= 3 * sum(local_shard(p).nbytes for p in self.model.parameters())
        barrier()  # all ranks of a host read the free memory before any rank allocates
        line = self.saver.reserve(self.model, self.step.optimizer, free_bytes)
        if line is not None and self.comm.is_first:
            Terminal().say(line)
        if self.reference is not None:
            self.reference.fill(self)
        self.loader = loader_of(self.job, self.data_rank)
        self.loader.device = self.comm.device
        return self.loader

    @override
    def parts(self) -> dict[str, Stateful]:
        more: dict[str, Stateful | None] = {"base": self.base, "reference": self.reference}
        return super().parts() | {name: part for name, part in more.items() if part is not None}

    @override
    def manifest(self, *, is_passing: bool) -> Manifest:
        done = (self.step.steps_done, self.loader.consumed)
        return manifest_of(self.job, *done, is_passing=is_passing)

    @property
    @override
    def num_steps(self) -> int:
        return self.job.num_steps

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
        if self.job.tokens.chat is not None:  # labels are some tokens of a text, not all its bytes
            return {}
        token_bytes = self.job.tokens.token_bytes()
        num_bytes = self.validation.count_bytes(self._validation_rows(), token_bytes)
        return {"bits_per_byte": loss_sum / math.log(2) / num_bytes}

    def _validation_rows(self) -> Any:
        return evaluation_rows(len(self.validation), self.job.config.eval_samples)

    @override
    def num_units(self, result: StepResult) -> int:
        if self.job.has_pairs:
            return result.num_valid_tokens
        return self.loader.num_rows * self.job.config.corpus.seq_len

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
            # Backward of the pairs' loss holds logarithms of the softmax, and two gradients.
            logit_bytes=3 * max(4, self.precision.compute.itemsize) if job.has_pairs else 0,
            is_muon=job.config.optimizer.kind == "muon",
        )

    @override
    def sample(self) -> str:
        job = self.job
        tokenizer = load_tokenizer(job.tokens.tokenizer)
        prompt, ids, end_ids = job.config.prompt, None, [job.tokens.train.end_id]
        if job.tokens.chat is not None:
            from phalanx.data.chats import encode_opening  # imports jinja2

            prompt, ids = encode_opening(job.tokens.chat, tokenizer, prompt)
            prompt, end_ids = f"user: {prompt}\nassistant: ", job.tokens.chat["end_ids"]
        elif prompt is None:
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
                ids=ids,
                end_ids=end_ids,
                seed=job.config.seed,
            )


def _keep(_shard: torch.Tensor, _name: str, _full: Any, _offset: Any) -> None:
    """Leave a shard as it is."""


@dataclass(frozen=True)
class AdaptedBase:
    """The frozen weights that a run adapts; its checkpoints have only their folder and checksum."""

    weights: Weights
    checksum: str

    def state_dict(self) -> list[str]:
        """Return what a checkpoint has instead of the weights."""
        return [str(self.weights.folder.absolute()), self.checksum]

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Do nothing: `base_of` has opened the base of the checkpoint."""

    def write_adapters(self, checkpoint: Path) -> None:
        """Write the adapters of a checkpoint as PEFT's folder beside the checkpoints of its run.

        No folder is written for a shape that no Hugging Face model type computes.
        """
        with suppress(ConfigError):
            family, weights = names_of(self.weights), open_checkpoint(checkpoint)
            final = checkpoint.parent.parent / FOLDER
            with new_folder(final) as folder:
                write_peft(folder, weights, str(self.weights.folder.absolute()), family)
                if (final / CONFIG).is_file():
                    remove_folder(final)
            weights.close()


def base_of(job: Job) -> AdaptedBase | None:
    """Open the frozen weights of a job with adapters; None without; all ranks call this.

    A resume compares them with the checksums in its checkpoint (checkpoint/frozen.py). If their
    folder has moved, it reads them where the setting `model` says.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    if job.shape.lora is None or job.weights_folder is None:
        return None
    named = None if job.start is None else base_in(job.start.about, job.start.folder)
    folder = job.weights_folder if named is None else Path(named[0])
    if not folder.exists():
        moved = Path(job.config.model or "").expanduser()
        if not is_hugging_face(moved):
            raise CheckpointError(
                f"the run adapts the weights in {folder}, which does not exist; if the folder has "
                f"moved, give it by --model PATH/{folder.name}"
            )
        folder = moved
    weights = open_weights(folder)
    doing = f"cannot adapt {weights.folder}"
    return AdaptedBase(weights, on_first_rank(lambda: checksum_of(weights.folder), doing))


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
