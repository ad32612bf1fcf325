"""Run a few steps on the ranks of a job and write down all that training depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.ledger import Entry, Ledger, Phase
from phalanx.config import OptimizerConfig
from phalanx.errors import ConfigError
from phalanx.parallel.accumulate import Accumulate
from phalanx.parallel.plan import Plan, shard_of
from phalanx.strategy import Strategy
from phalanx.train.clip import gradient_norm
from phalanx.train.objective import Objective
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import cast_batch, count_rows, rows_of, split
from phalanx.verify.reference import NORMS, StepRecord

_MOMENTS = ("first moment", "second moment", "step counter")


@dataclass(frozen=True)
class Case:
    """What is run; every field can be pickled.

    Attributes:
        build: returns the model with its first weights, the same in every process.
        objective: how a microbatch becomes a loss.
        batches: the global batch of each step: a tensor, a mapping or list of tensors, or a
            dataclass of them, the first dimension being the samples.
        accumulation: microbatches that each rank cuts its share into.
        dtype: data type of the weights and the arithmetic.
        optimizer: AdamW's settings.
        roles: patterns of module names to roles for tp; those known for the model if None.
        reference: another build and objective for the reference, with the same names of parameters;
            those of the case itself if None.
        device: "cpu" or "cuda".
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


@dataclass(frozen=True)
class RankFacts:
    """What one rank holds after a step, small enough to compare between all ranks.

    Attributes:
        loss: as this rank knows it.
        norms: p -> norm of the gradient.
        bits: (quantity, name, where the shard begins) -> hash of this rank's shard.
        trained: names of the parameters that have a gradient.
        nonfinite: names of the parameters whose gradient is not finite here.
    """

    loss: float
    norms: Mapping[float, float]
    bits: Mapping[tuple[str, str, tuple[int, ...]], str]
    trained: frozenset[str]
    nonfinite: tuple[str, ...]


class SplitRun:
    """The steps of a case under a strategy, on this rank.

    Attributes:
        model: split.
        place: this rank's number among the data ranks, and how many those are.
    """

    def __init__(self, case: Case, strategy: Strategy, comm: Ranks) -> None:
        # It warns, once a layout, that it gathers a weight axis by axis; here that is as good.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self._case = case
        self._ledger = Ledger(comm.mesh)
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        self.model = case.build().to(comm.device, self._dtype).train()
        self.place = comm.coord("data"), comm.size("data")
        # Before the optimizer takes the parameters.
        reducer = Plan(strategy, self.model, roles=case.roles).build(comm)
        self._step = Step(
            self.model,
            build_optimizer(self.model, case.optimizer),
            case.objective,
            case.optimizer,
            comm=comm,
            num_steps=len(case.batches),
            run=Accumulate(reducer),
            nonfinite="skip",  # what is not finite is compared and named
        )

    def first_weights(self) -> dict[str, Tensor]:
        """Return the weights before the first step; every rank calls this together."""
        return {name: full(p) for name, p in self.model.named_parameters()}

    def rows(self, step: int) -> list[Tensor]:
        """Return the rows of the global batch that are in each microbatch of this rank."""
        return rows_of(self._case.batches[step], *self.place, self._case.accumulation)

    def sent(self) -> list[Entry]:
        """Return what this rank has sent in the last step."""
        return self._ledger.entries()

    def steps(self, phase: Phase | None = None) -> Iterator[tuple[StepRecord, RankFacts]]:
        """Take the steps one by one; every rank does so together.

        Args:
            phase: watches the phases of each step.
        """
        step = self._step
        for number, batch in enumerate(self._case.batches, start=1):
            moved = cast_batch(batch, self._dtype, step.comm.device)
            with ExitStack() as watching:
                if number == len(self._case.batches):
                    watching.enter_context(self._ledger)
                    watching.enter_context(step.watched(self._ledger.phase))
                if phase is not None:
                    watching.enter_context(step.watched(phase))
                microbatches = split(moved, *self.place, self._case.accumulation)
                loss, num_valid = step.compute_gradients(microbatches)
            norms = {p: float(gradient_norm(step.gradients(), step.comm, p)) for p in NORMS}
            found = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
            gradients = {name: full(grad) for name, grad in found}
            bits = _bits("gradient", found)
            nonfinite = [n for n, g in found if not bool(local_shard(g).isfinite().all())]
            result = step.apply_gradients(loss, num_valid)
            norms[step.config.clip_p] = result.grad_norm
            moments = [
                state_of(self.model, step.optimizer, key)
                for key in ("exp_avg", "exp_avg_sq", "step")
            ]
            for quantity, state in zip(_MOMENTS, moments, strict=True):
                bits |= _bits(quantity, state)
            weights = list(self.model.named_parameters())
            bits |= _bits("weight", weights)
            first, second, _ = ({n: full(t) for n, t in state} for state in moments)
            after = {name: full(tensor) for name, tensor in weights}
            record = StepRecord(result.loss, norms, gradients, first, second, after)
            names = frozenset(name for name, _ in found)
            yield record, RankFacts(result.loss, norms, bits, names, tuple(nonfinite))


def check_rows(case: Case, num_places: int) -> None:
    """Refuse batches with fewer rows than microbatches.

    Raises:
        ConfigError: names the batch.
    """
    for step, batch in enumerate(case.batches):
        num_rows, least = count_rows(batch), num_places * case.accumulation
        if num_rows < least:
            raise ConfigError(
                f"batch {step} has {num_rows} rows, which cannot be cut into {case.accumulation} "
                f"microbatches on each of {num_places} data ranks; give at least {least} rows"
            )


@dataclass(frozen=True)
class Unequal:
    """Ranks differ in what they should hold alike.

    Attributes:
        step: number of the step, from 0.
        name: of the parameter; empty for the loss and the norm.
        rank: that differs from an earlier one.
        text: in words.
    """

    step: int
    name: str
    rank: int
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


def unequal_ranks(step: int, facts: Sequence[RankFacts]) -> list[Unequal]:
    """Return in what the ranks differ, roughly in the order of a step."""
    found = _unequal_numbers(step, "the loss", [rank.loss for rank in facts])
    for name in sorted(frozenset[str]().union(*(rank.trained for rank in facts))):
        without = [number for number, rank in enumerate(facts) if name not in rank.trained]
        if without:
            text = f"{name} has a gradient on some ranks, but none on rank {without[0]}"
            found.append(Unequal(step, name, without[0], text))
    first: dict[tuple[str, str, tuple[int, ...]], tuple[int, str]] = {}
    seen: set[tuple[str, str]] = set()
    for number, rank in enumerate(facts):
        for key, digest in rank.bits.items():
            holder, other = first.setdefault(key, (number, digest))
            if other != digest and key[:2] not in seen:
                seen.add(key[:2])
                text = (
                    f"the {key[0]} of {key[1]} on rank {number} is not that of its replica on rank "
                    f"{holder}"
                )
                found.append(Unequal(step, key[1], number, text))
    for p in facts[0].norms:
        norms = [rank.norms[p] for rank in facts]
        found += _unequal_numbers(step, f"the {p:g}-norm of the gradient", norms)
    return found


def _unequal_numbers(step: int, what: str, numbers: Sequence[float]) -> list[Unequal]:
    odd = [rank for rank, number in enumerate(numbers) if not _is_same(number, numbers[0])]
    if not odd:
        return []
    text = f"{what} is {numbers[0]:.17g} on rank 0 and {numbers[odd[0]]:.17g} on rank {odd[0]}"
    return [Unequal(step, "", odd[0], text)]


def _is_same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, key: str
) -> list[tuple[str, Tensor]]:
    """Return one part of the optimizer's state, by the names of the parameters that have it."""
    state = optimizer.state
    return [(name, state[p][key]) for name, p in model.named_parameters() if p in state]


def _bits(
    quantity: str, tensors: Sequence[tuple[str, Tensor]]
) -> dict[tuple[str, str, tuple[int, ...]], str]:
    found: dict[tuple[str, str, tuple[int, ...]], str] = {}
    for name, tensor in tensors:
        part, offset = shard_of(tensor)
        data = part.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[quantity, name, offset] = hashlib.blake2b(data, digest_size=16).hexdigest()
    return found


def full(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor on the CPU, gathered if it is sharded."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().clone()
