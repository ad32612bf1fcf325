"""Run a few steps on the ranks of a job and write down all that training depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from phalanx.parallel.dropout import Masks
from phalanx.parallel.dropout import Place as DropoutPlace
from phalanx.parallel.plan import Plan, shard_of
from phalanx.parallel.reduce import is_fused
from phalanx.strategy import Strategy
from phalanx.train.objective import Objective
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import rows_of, split
from phalanx.verify.reference import (
    MOMENTS,
    NORMS,
    StepRecord,
    Training,
    Values,
    in_training,
)
from phalanx.verify.verdict import Place

BitsKey = tuple[str, str, tuple[int, ...]]
"""Quantity, name of the parameter, and where the shard begins."""


def loss_of(objective: Objective, model: nn.Module, batch: Any) -> Tensor:
    """Return the sum of the losses of a batch, as an evaluation takes it."""
    return objective.loss_sum(model, batch, 0)


@dataclass(frozen=True)
class Case:
    """What is run, see `harness.verify`; every field can be pickled.

    Attributes:
        dropout_seed: of masks that belong to the sample, which nn.Dropout draws on both sides; it
            draws from the process's generator if None.
        reference: another build and objective for the reference, with the same names of parameters;
            those of the case itself if None.
        infer: what is compared in `eval()` after the last step, of (objective, model, batch): a sum
            over the rows, or a tensor whose first dimension they are.
        training: how the reference updates its weights, in place of `optimizer`.
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
        """The data type as torch has it."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class RankFacts:
    """What one rank holds after a step, small enough to compare between all ranks.

    Attributes:
        loss: as this rank knows it.
        norms: p -> norm of the gradient.
        bits: hash of each shard of this rank.
        nonfinite: names of the parameters whose gradient is not finite here.
    """

    loss: float
    norms: Mapping[str, float]
    bits: Mapping[BitsKey, str]
    nonfinite: list[str]


class SplitRun:
    """The steps of a case on this rank, split.

    Attributes:
        ledger: has what the last step sends.
        model: the rank's shard.
        plan: by which it is split.
        runner: of each step.
    """

    def __init__(self, case: Case, strategy: Strategy, comm: Ranks) -> None:
        # It warns, once a layout, that it gathers a weight axis by axis; here that is as good.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self._case = case
        self.ledger = Ledger(comm)
        self._shard = comm.coord("data"), comm.size("data"), case.accumulation
        self.model = in_training(case.build()).to(comm.device, case.torch_dtype)
        self._dropout_calls: dict[int, dict[str, int]] = {}
        seed = case.dropout_seed
        self.plan = Plan(
            strategy,
            self.model,
            roles=case.roles,
            batch_norm=case.batch_norm,
            masks=None if seed is None else Masks(seed, self._place),
            pp_rank=comm.coord("pp"),
        )
        # Before the optimizer takes the parameters.
        self.runner = self.plan.build(comm)
        self._step = Step(
            self.model,
            build_optimizer(self.model, case.optimizer),
            case.objective,
            case.optimizer,
            comm=comm,
            num_steps=len(case.batches),
            run=self.runner,
            nonfinite="skip",  # what is not finite is compared and named
        )

    def evaluate(self, phase: Phase = no_phase) -> Tensor | None:
        """Return what this rank's rows of the last batch give in `eval()`; all call this.

        None on ranks that do not hold the last stage of a pipeline.
        """
        case, comm, model = self._case, self._step.comm, self.model
        moved = cast_batch(case.batches[-1], case.torch_dtype, comm.device)
        (own,) = split(moved, comm.coord("data"), comm.size("data"), 1)
        modes = {module: module.training for module in model.modules()}
        model.eval()
        self.runner.microbatch = 0

        def forward(batch: Any) -> Tensor:
            with phase("forward"):
                return case.infer(case.objective, model, batch)

        made = self.runner.infer(own, forward)
        for module, is_training in modes.items():
            module.training = is_training
        return made

    @property
    def evaluated_rows(self) -> Tensor:
        """The rows of the last batch that `evaluate` takes on this rank."""
        rank, num_ranks, _ = self._shard
        return rows_of(self._case.batches[-1], rank, num_ranks, 1)[0]

    def rows(self, step: int) -> list[Tensor]:
        """Return the rows of the global batch that are in each microbatch of this rank."""
        return rows_of(self._case.batches[step], *self._shard)

    def _place(self) -> DropoutPlace:
        """Return where the forward under way stands."""
        number, step = self.runner.microbatch, self._step.steps_done
        calls = self._dropout_calls.setdefault(number, {})
        return DropoutPlace(step, self.rows(step)[number], calls)

    def steps(self, phase: Phase = no_phase) -> Iterator[tuple[StepRecord, RankFacts]]:
        """Take the steps one by one, each watched by `phase`; every rank does so together."""
        case, step, model = self._case, self._step, self.model
        for number, batch in enumerate(case.batches, start=1):
            moved = cast_batch(batch, case.torch_dtype, step.comm.device)
            self._dropout_calls.clear()
            with ExitStack() as watching:
                if number == len(case.batches):
                    watching.enter_context(self.ledger)
                    watching.enter_context(step.watched(self.ledger.phase))
                watching.enter_context(step.watched(phase))
                loss, num_valid = step.compute_gradients(split(moved, *self._shard))
            norms = {f"{p:g}": float(step.norm(p)) for p in NORMS}
            gradients = gradients_of(model)
            bits, before_clipping = (
                bits_of("gradient", gradients),
                full_tensors(gradients, step.comm),
            )
            nonfinite = [n for n, g in gradients.items() if not local_shard(g).isfinite().all()]
            result = step.apply_gradients(loss, num_valid)
            norms[f"{step.config.clip_p:g}"] = result.grad_norm
            record: dict[str, Values] = {"loss": {"": result.loss}, "norm": norms}
            record |= {"gradient": before_clipping, "learning rate": {"": result.learning_rate}}
            kept = {"buffer": dict(model.named_buffers()), **state_of(model, step.optimizer)}
            for quantity, tensors in kept.items():
                bits |= bits_of(quantity, tensors)
                record[quantity] = full_tensors(tensors, step.comm)
            yield record, RankFacts(result.loss, norms, bits, nonfinite)


def check_rows(case: Case, num_data_ranks: int) -> None:
    """Refuse a batch with fewer rows than microbatches."""
    for step, batch in enumerate(case.batches):
        num_rows, least = count_rows(batch), num_data_ranks * case.accumulation
        if num_rows < least:
            raise ConfigError(
                f"batch {step} has {num_rows} rows, which cannot be cut into {case.accumulation} "
                f"microbatches on each of {num_data_ranks} data ranks; give at least {least} rows"
            )


def unequal_ranks(step: int, facts: Sequence[RankFacts]) -> list[Place]:
    """Return in what ranks differ that should be alike, roughly in the order of a step."""
    found = _unequal_numbers(step, "the loss", [rank.loss for rank in facts])
    # A stage of a pipeline holds some of the parameters.
    held, trained = (
        [{name for kind, name, _ in rank.bits if kind == wanted} for rank in facts]
        for wanted in ("weight", "gradient")
    )
    for name in sorted(set[str]().union(*trained)):
        without = [r for r, names in enumerate(trained) if name in held[r] and name not in names]
        if without:
            text = f"{name} has a gradient on some ranks, but none on rank {without[0]}"
            found.append(Place(owner(name), text, step, without[0]))
    first: dict[BitsKey, tuple[int, str]] = {}
    seen: set[tuple[str, str]] = set()
    for number, rank in enumerate(facts):
        for key, digest in rank.bits.items():
            quantity, name, _ = key
            holder, other = first.setdefault(key, (number, digest))
            if other != digest and (quantity, name) not in seen:
                seen.add((quantity, name))
                text = (
                    f"the {quantity} of {name} on rank {number} is not that of its replica on rank "
                    f"{holder}"
                )
                found.append(Place(owner(name), text, step, number))
    for p in facts[0].norms:
        norms = [rank.norms[p] for rank in facts]
        found += _unequal_numbers(step, f"the {p}-norm of the gradient", norms)
    return found


def _unequal_numbers(step: int, what: str, numbers: Sequence[float]) -> list[Place]:
    same = repr(numbers[0])  # unlike the number itself, that of NaN equals NaN's
    odd = [rank for rank, number in enumerate(numbers) if repr(number) != same]
    if not odd:
        return []
    text = f"{what} is {numbers[0]:.17g} on rank 0 and {numbers[odd[0]]:.17g} on rank {odd[0]}"
    return [Place(None, text, step, odd[0])]


def owner(parameter: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that there are, by the names of their parameters."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return what AdamW keeps, and the weights, by quantity and by the names of the parameters."""
    named = dict(model.named_parameters())
    states = {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
    keys = {**MOMENTS, "step counter": "step"}
    return {
        **{what: {n: state[key] for n, state in states.items()} for what, key in keys.items()},
        "weight": {name: p.detach() for name, p in named.items()},
    }


def bits_of(quantity: str, tensors: Mapping[str, Tensor]) -> dict[BitsKey, str]:
    """Return a hash of each shard of this rank."""
    found: dict[BitsKey, str] = {}
    for name, tensor in tensors.items():
        shard, offset = shard_of(tensor)
        digest = hashlib.blake2b(_bytes_of(shard), digest_size=16)
        found[quantity, name, offset] = digest.hexdigest()
    return found


def _bytes_of(shard: Tensor) -> bytes:
    return shard.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


class Part(NamedTuple):
    """A shard on its way to rank 0.

    Attributes:
        shape: of the full tensor.
        dtype: of its elements.
        place: where the shard is in it.
        data: the bytes of the shard.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[slice, ...]
    data: bytes


def full_tensors(tensors: Mapping[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Return copies on the CPU on rank 0, and nothing of use elsewhere; every rank calls this.

    Rank 0 holds what all ranks bring at once, besides what it makes of it.
    """
    parts: dict[str, Part] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor) and (is_fused(tensor) or not tensor.is_floating_point()):
            tensor = tensor.full_tensor()
        shard, offset = shard_of(tensor)
        if shard.numel() and _brings(tensor, comm):
            ends = zip(offset, shard.shape, strict=True)
            place = tuple(slice(i, i + size) for i, size in ends)
            parts[name] = Part(tuple(tensor.shape), shard.dtype, place, _bytes_of(shard))
    full: dict[str, Tensor] = {}
    for of_rank in gather_on_first(parts):
        for name, (shape, dtype, place, data) in of_rank.items():
            if name not in full:
                # What no rank brings stays NaN, which passes no comparison.
                nothing = math.nan if dtype.is_floating_point else 0
                full[name] = torch.full(shape, nothing, dtype=dtype)
            part = full[name][place]
            part.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view_as(part))
    return full


def _brings(tensor: Tensor, comm: Comm) -> bool:
    """Tell whether this rank is the first of its stage that holds its shard."""
    shards: set[str] = set()
    if isinstance(tensor, DTensor):
        assert not any(p.is_partial() for p in tensor.placements), "a sum over ranks is still owed"
        names = tensor.device_mesh.mesh_dim_names or ()
        pairs = zip(names, tensor.placements, strict=True)
        sharded = [name for name, placement in pairs if not placement.is_replicate()]
        shards = {axis for name in sharded for axis in comm.axes_of(name)}
    return all(comm.coord(axis) == 0 for axis in comm.axes if axis != "pp" and axis not in shards)
