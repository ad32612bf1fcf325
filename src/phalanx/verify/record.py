"""Run a few steps on the ranks of a job, and record all values on which training depends."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.ledger import Ledger, Phase, no_phase
from phalanx.comm.together import gather_on_first
from phalanx.config import OptimizerConfig
from phalanx.data.rows import cast_batch, count_rows
from phalanx.errors import ConfigError
from phalanx.parallel.batch_norm import Statistics
from phalanx.parallel.dropout import MaskPosition, Masks
from phalanx.parallel.plan import Plan, shard_of
from phalanx.parallel.reduce import is_fused
from phalanx.strategy import Strategy
from phalanx.train.objective import Objective
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step, StepResult
from phalanx.verify.batches import rows_of, split
from phalanx.verify.reference import (
    NORMS,
    BitsKey,
    History,
    RankFacts,
    StepRecord,
    Training,
    dense,
    evaluating,
    in_training,
    kept_by,
)

if TYPE_CHECKING:
    from phalanx.verify.served_case import ServedCase


def loss_of(objective: Objective, model: nn.Module, batch: Any) -> Tensor:
    """Return the sum of the losses of a batch, as in an evaluation."""
    return objective.loss_sum(model, batch, 0)


@dataclass(frozen=True)
class Case:
    """A case to run, with the arguments of `harness.verify`; every field can be pickled.

    Attributes:
        dropout_seed: seed of masks keyed by sample, which nn.Dropout draws on both sides; if None,
            it draws from the process's generator.
        reference: other build function and objective for the reference, with equal parameter names;
            if None, the case's own.
        infer: function of (objective, model, batch) whose result in `eval()` after the last step is
            compared: a sum over the rows, or a tensor with the rows as first dimension.
        training: optimizer of the reference, in place of `optimizer`; if None, AdamW.
    """

    build: Callable[[], nn.Module]
    objective: Objective
    batches: Sequence[Any]
    accumulation: int = 1
    dtype: str = "float64"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    roles: Mapping[str, str] | None = None
    reference: tuple[Callable[[], nn.Module], Objective] | None = None
    device: str = "cpu"
    batch_norm: Statistics | None = None
    dropout_seed: int | None = None
    infer: Callable[[Objective, nn.Module, Any], Tensor] = loss_of
    training: Training | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The data type as a torch.dtype."""
        return getattr(torch, self.dtype)


class Witness:
    """Recorder of the values of steps; every rank calls its methods together."""

    def __init__(self, comm: Comm) -> None:
        self.history = History()
        self._comm = comm

    def note(
        self,
        step: int,
        held: Mapping[str, Mapping[str, Tensor]],
        numbers: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Add quantities of a step to the history: tensors (`held`) and numbers."""
        facts = self.history.facts.setdefault(step, RankFacts())
        record = self.history.records.setdefault(step, {})
        for quantity, given in held.items():
            tensors = dense(given)
            facts.bits.update(bits_of(quantity, tensors))
            record.setdefault(quantity, {}).update(full_tensors(tensors, self._comm))
        for quantity, values in numbers.items():
            facts.numbers.setdefault(quantity, {}).update(values)
            record.setdefault(quantity, {}).update(values)
        gradients = dense(held.get("gradient", {})).items()
        facts.nonfinite.extend(n for n, g in gradients if not local_shard(g).isfinite().all())


class StepWitness(Witness):
    """Recorder of the values that a `Step` computes."""

    def __init__(self, step: Step, comm: Comm | None = None) -> None:
        super().__init__(comm or step.comm)
        self.step = step

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Record gradients and norms before clipping, and the learning rates before the update."""
        step = self.step
        if name == "clip":
            norms = {f"{p:g}": float(step.norm(p)) for p in NORMS}
            self.note(step.steps_done, {"gradient": gradients_of(step.model)}, {"norm": norms})
        if name == "optimizer" and step.num_steps is None:  # the user's scheduler sets the rates
            groups = enumerate(step.optimizer.param_groups)
            rates = {str(number) if number else "": float(group["lr"]) for number, group in groups}
            self.note(step.steps_done, {}, {"learning rate": rates})
        yield

    def keep(self, result: StepResult) -> None:
        """Record the step that has ended."""
        config = self.step.config
        numbers = {"loss": {"": result.loss}, "norm": {f"{config.clip_p:g}": result.grad_norm}}
        if self.step.num_steps is not None:
            numbers["learning rate"] = {"": result.learning_rate}
        self.note(self.step.steps_done - 1, self.held(), numbers)

    def held(self) -> dict[str, dict[str, Tensor]]:
        """Return buffers, optimizer state and weights, by quantity and name."""
        model = self.step.model
        return {"buffer": dict(model.named_buffers()), **state_of(model, self.step.optimizer)}


class SplitRun:
    """The steps of a case on this rank, under a strategy."""

    def __init__(self, case: Case, strategy: Strategy, comm: Ranks) -> None:
        # DTensor warns, once per layout, that it gathers a weight axis by axis: no problem here.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self._case, self._comm = case, comm
        self.ledger = Ledger(comm)
        self._shard = comm.coord("data"), comm.size("data"), case.accumulation
        self.model = in_training(case.build()).to(comm.device, case.torch_dtype)
        self._dropout_calls: dict[int, dict[str, int]] = {}
        seed = case.dropout_seed
        self.plan = Plan(
            strategy.of_worker,
            self.model,
            roles=case.roles,
            batch_norm=case.batch_norm,
            masks=None if seed is None else Masks(seed, self._place),
            pp_rank=comm.coord("pp"),
        )
        # Before the optimizer is built, because this replaces parameters.
        self.runner = self.plan.build(comm)
        optimizer = build_optimizer(self.model, case.optimizer)
        given = (self.model, optimizer, case.objective, case.optimizer)
        more: dict[str, Any] = {"num_steps": len(case.batches), "run": self.runner}
        more["nonfinite"] = "skip"  # so that a step that is not finite is compared and reported
        self._served: ServedCase | None = None
        if strategy.is_served:
            from phalanx.verify.served_case import ServedCase  # it needs pyzmq

            self._served = ServedCase(strategy, comm.rank, len(case.batches))
            self._step = self._served.step(*given, **more)
        else:
            self._step = Step(*given, comm=comm, **more)

    def close(self) -> None:
        """Stop the parameter servers, if any; every rank calls this together."""
        if self._served is not None:
            self._served.close()

    def evaluate(self, phase: Phase = no_phase) -> Tensor | None:
        """Return `case.infer` of this rank's rows of the last batch in `eval()`; all call this.

        None on ranks that do not have the last stage of a pipeline.
        """
        case, comm, model = self._case, self._comm, self.model
        moved = cast_batch(case.batches[-1], case.torch_dtype, comm.device)
        (own,) = split(moved, comm.coord("data"), comm.size("data"), 1)
        self.runner.microbatch = 0

        def forward(batch: Any) -> Tensor:
            with phase("forward"):
                return case.infer(case.objective, model, batch)

        with evaluating(model):
            return self.runner.infer(own, forward)

    @property
    def evaluated_rows(self) -> Tensor:
        """Indices of the rows of the last batch that `evaluate` uses on this rank."""
        rank, num_ranks, _ = self._shard
        return rows_of(self._case.batches[-1], rank, num_ranks, 1)[0]

    def rows(self, step: int) -> list[Tensor]:
        """Return the row indices in the global batch of each microbatch of this rank."""
        return rows_of(self._case.batches[step], *self._shard)

    def _place(self) -> MaskPosition:
        """Return the step, the rows and the call counts of the current forward, to key masks."""
        number, step = self.runner.microbatch, self._step.steps_done
        calls = self._dropout_calls.setdefault(number, {})
        return MaskPosition(step, self.rows(step)[number], calls)

    def steps(self, phase: Phase = no_phase) -> Iterator[tuple[StepRecord, RankFacts]]:
        """Take the steps one by one, with `phase` around each phase; all ranks do so together."""
        case, step = self._case, self._step
        witness = StepWitness(step, self._comm)
        for number, batch in enumerate(case.batches):
            moved = cast_batch(batch, case.torch_dtype, step.comm.device)
            self._dropout_calls.clear()
            with ExitStack() as watching:
                if number == len(case.batches) - 1:
                    watching.enter_context(self.ledger)
                    watching.enter_context(step.watched(self.ledger.phase))
                watching.enter_context(step.watched(phase))
                made = step.compute_gradients(split(moved, *self._shard))
            with step.watched(witness.phase), step.watched(phase):
                witness.keep(step.apply_gradients(*made))
            yield witness.history.records.pop(number), witness.history.facts.pop(number)


def check_rows(case: Case, num_data_ranks: int) -> None:
    """Raise ConfigError if a batch has fewer rows than microbatches."""
    for step, batch in enumerate(case.batches):
        num_rows, least = count_rows(batch), num_data_ranks * case.accumulation
        if num_rows < least:
            raise ConfigError(
                f"batch {step} has {num_rows} rows, which cannot be cut into {case.accumulation} "
                f"microbatches on each of {num_data_ranks} data ranks; give at least {least} rows"
            )


def owner(parameter: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that exist, by the names of their parameters."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state and the weights, by quantity and parameter name."""
    named = dict(model.named_parameters())
    states = {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
    counts = {name: state["step"] for name, state in states.items() if "step" in state}
    return {
        **kept_by(states),
        "step counter": {name: n for name, n in counts.items() if isinstance(n, Tensor)},
        "weight": {name: p.detach() for name, p in named.items()},
    }


def bits_of(quantity: str, tensors: Mapping[str, Tensor]) -> dict[BitsKey, str]:
    """Return a hash of this rank's shard of each tensor."""
    found: dict[BitsKey, str] = {}
    for name, tensor in tensors.items():
        shard, offset = shard_of(tensor)
        digest = hashlib.blake2b(_bytes_of(shard), digest_size=16)
        found[quantity, name, offset] = digest.hexdigest()
    return found


def _bytes_of(shard: Tensor) -> bytes:
    return shard.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def full_tensors(tensors: Mapping[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Return full copies on the CPU on rank 0, an empty dict elsewhere; every rank calls this.

    Rank 0 has the gathered shards of all ranks in memory together with the full tensors.
    """
    return assembled(gather_on_first(shards_to_send(tensors, comm)))


Shards = dict[str, tuple[tuple[int, ...], torch.dtype, tuple[slice, ...], bytes]]
"""Shards of a rank by name: shape and dtype of the full tensor, place and bytes of the shard."""


def shards_to_send(tensors: Mapping[str, Tensor], comm: Comm) -> Shards:
    """Return the shards of which this rank holds the first replica."""
    parts: Shards = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor) and (is_fused(tensor) or not tensor.is_floating_point()):
            tensor = tensor.full_tensor()
        shard, offset = shard_of(tensor)
        if shard.numel() and _sends_shard(tensor, comm):
            ends = zip(offset, shard.shape, strict=True)
            place = tuple(slice(i, i + size) for i, size in ends)
            parts[name] = tuple(tensor.shape), shard.dtype, place, _bytes_of(shard)
    return parts


def assembled(ranks: Iterable[Shards]) -> dict[str, Tensor]:
    """Return the full tensors, on the CPU, from the shards of all ranks."""
    full: dict[str, Tensor] = {}
    for of_rank in ranks:
        for name, (shape, dtype, place, data) in of_rank.items():
            if name not in full:
                # Elements that no rank sends stay NaN, so that a comparison fails.
                nothing = math.nan if dtype.is_floating_point else 0
                full[name] = torch.full(shape, nothing, dtype=dtype)
            part = full[name][place]
            part.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view_as(part))
    return full


def _sends_shard(tensor: Tensor, comm: Comm) -> bool:
    """Return whether this rank is the first replica of its shard, among the ranks of its stage."""
    shards: set[str] = set()
    if isinstance(tensor, DTensor):
        assert not any(p.is_partial() for p in tensor.placements), "a sum over ranks is pending"
        names = tensor.device_mesh.mesh_dim_names or ()
        pairs = zip(names, tensor.placements, strict=True)
        sharded = [name for name, placement in pairs if not placement.is_replicate()]
        shards = {axis for name in sharded for axis in comm.axes_of(name)}
    return all(comm.coord(axis) == 0 for axis in comm.axes if axis != "pp" and axis not in shards)
