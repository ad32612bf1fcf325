"""A training step to count and to price: a model, a strategy and a batch. No torch until asked."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from phalanx.account.parameters import num_parameters
from phalanx.models.block_weights import hidden_matrices
from phalanx.models.shape import ModelShape
from phalanx.strategy import Axis, Recompute, Strategy

if TYPE_CHECKING:
    from phalanx.account.module import AnyModule
    from phalanx.parallel.plan import Plan
    from phalanx.parallel.split import StateBytes

STATE_BYTES: Final = 16
"""Bytes per parameter: value, gradient and the two moments of AdamW, 32 bits each."""

PURE, PURE_BYTES = "pure-bfloat16", 8
"""A precision that `train` does not support, and its bytes per parameter: all four in 16 bits."""

IMBALANCE: Final = 1.15
"""Rows of the busiest rank of ep / the mean, unless it is given: `benchmarks/planner/imbalance.py`
measured it for a small decoder on 4 ranks, after 200 steps with a balancing loss. The first steps
have 1.7, and more ranks have more."""


class InFlight(NamedTuple):
    """Bytes of microbatches in flight that a rank holds until their backward, temporaries included.

    Attributes:
        casts: weights cast by each block.
        activations: saved tensors, and temporaries other than the logits'.
        logits: temporaries of the loss.
        like: pp coordinate of the first rank with equal stages.
    """

    casts: int
    activations: int
    logits: int
    like: int


AnyModel = TypeVar("AnyModel", bound="DecoderModel | AnyModule", covariant=True)


@dataclass(frozen=True)
class PlannedStep(Generic[AnyModel]):
    """A training step of a model under a strategy.

    Attributes:
        microbatch: sequences in one forward pass of one rank.
        accumulation: microbatches of one step.
    """

    model: AnyModel
    strategy: Strategy
    microbatch: int
    accumulation: int

    @property
    def with_one_data_axis(self) -> PlannedStep[AnyModel]:
        """The step with dp in fsdp, if the strategy has fsdp: its operations are the same."""
        strategy = self.strategy
        if strategy.fsdp.degree == 1:
            return self
        fsdp = Axis(strategy.dp.degree * strategy.fsdp.degree, Strategy.fsdp.kind)
        return dataclasses.replace(
            self, strategy=dataclasses.replace(strategy, dp=Strategy.dp, fsdp=fsdp)
        )

    @property
    def counts_loads(self) -> bool:
        """Whether forwards of their own count the loads of experts (train/balance.py)."""
        experts = self.model.shape.experts if isinstance(self.model, DecoderModel) else None
        stages = self.strategy.pp.degree
        return experts is not None and experts.needs_first_pass(self.accumulation, stages)

    @property
    def num_sequences(self) -> int:
        """Sequences of one step over all ranks."""
        return self.microbatch * self.accumulation * self.strategy.data_ranks

    @property
    def precision(self) -> str:
        """Data type of the arithmetic."""
        return self.model.precision

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.model.seq_len

    @property
    def plan(self) -> Plan[Any]:
        """The plan that `train` would build; raises StrategyError if it cannot split the model."""
        return self.model.plan(self.strategy, self.microbatch)


@dataclass(frozen=True)
class DecoderModel:
    """A decoder, counted by one block of each kind; `module.AnyModule` has the same interface.

    Attributes:
        seq_len: tokens of a sequence.
        precision: data type of the arithmetic.
        has_documents: whether a sequence packs several documents.
        moments: 2, as for AdamW, or 0 without an optimizer.
        is_muon: whether Muon updates the matrices of blocks, with one moment each.
        logit_bytes: bytes held per logit by a loss that reads all logits of a microbatch; else 0.
        imbalance: rows that the rank of ep with the most rows computes, as a multiple of the mean.
    """

    shape: ModelShape
    seq_len: int
    precision: str = "bfloat16"
    has_documents: bool = False
    moments: float = 2.0
    logit_bytes: int = 0
    imbalance: float = IMBALANCE
    is_muon: bool = False

    @property
    def without_losses(self) -> DecoderModel:
        """The model without auxiliary losses of its experts."""
        if self.shape.experts is None or not self.shape.experts.has_losses:
            return self
        experts = self.shape.experts.without_losses
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, experts=experts))

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters."""
        return num_parameters(self.shape).total

    @property
    def num_active(self) -> int:
        """Number of parameters that a token meets; all without experts."""
        return num_parameters(self.shape).active

    @property
    def num_trained(self) -> int:
        """Number of distinct parameters that are trained."""
        return num_parameters(self.shape).trained

    @property
    def tied_bytes(self) -> int:
        """Bytes of the gradient of a tied embedding, a part of which comes from the head."""
        is_trained = self.shape.tied and self.shape.lora is None
        return self.shape.vocab_size * self.shape.hidden * 4 if is_trained else 0

    def plan(self, strategy: Strategy, microbatch: int = 1) -> Plan[Any]:
        """Return the plan that `train` would build for any microbatch.

        Raises:
            StrategyError: the strategy cannot split the model.
        """
        return _plan(strategy, self.shape, self.precision)

    def muon_matrices(self, step: PlannedStep[Any], pp_rank: int) -> list[Matrices]:
        """Return what Muon updates on the ranks of a pp coordinate; nothing without Muon."""
        if not self.is_muon:
            return []
        return _hidden(step.strategy, self.shape, self.precision, pp_rank)

    def held(self, step: PlannedStep[Any], pp_rank: int) -> StateBytes:
        """Return the trained state's bytes on a rank of a pp coordinate."""
        strategy = step.strategy
        if strategy.recompute.segment_size(self.shape.num_layers) in (None, 1):
            # Blocks are gathered one by one, as without recomputation.
            strategy = dataclasses.replace(strategy, recompute=Recompute())
        return _held(strategy, self.shape, self.precision, step.accumulation > 1, pp_rank)

    def in_flight(
        self, step: PlannedStep[Any], device: str, kept: float, logit_bytes: int
    ) -> list[InFlight]:
        """Return the bytes in flight at each pp coordinate; they do not depend on fsdp's shards."""
        from phalanx.account.activations import in_flight

        logit_bytes = logit_bytes or self.logit_bytes * step.strategy.tp.degree  # tp gathers them
        return in_flight(step.with_one_data_axis, device, kept, logit_bytes)

    def flops(self, step: PlannedStep[Any]) -> tuple[float, float]:
        """Return the FLOPs of a step over all ranks with causal attention, and with full."""
        from phalanx.account.flops import step_flops

        of = self.shape, self.seq_len, step.num_sequences
        return step_flops(*of, "causal").model, step_flops(*of, "full").model


def decoder_step(
    shape: ModelShape,
    strategy: Strategy,
    seq_len: int,
    microbatch: int,
    accumulation: int,
    precision: str = "bfloat16",
    *,
    has_documents: bool = False,
    logit_bytes: int = 0,
    is_muon: bool = False,
) -> PlannedStep[DecoderModel]:
    """Return a step of a decoder; see `DecoderModel` and `PlannedStep`."""
    model = DecoderModel(
        *(shape, seq_len, precision, has_documents), logit_bytes=logit_bytes, is_muon=is_muon
    )
    return PlannedStep(model, strategy, microbatch, accumulation)


@functools.lru_cache(maxsize=1024)
def _plan(strategy: Strategy, shape: ModelShape, precision: str) -> Plan[Any]:
    import torch

    from phalanx.parallel.plan import plan_decoder

    compute: torch.dtype = getattr(torch, precision)
    master = torch.promote_types(compute, torch.float32)
    return plan_decoder(strategy, shape, master, compute)


class Matrices(NamedTuple):
    """Equal matrices of a pipeline stage.

    Attributes:
        shape: shape of one of them, whole.
        number: how many of them the stage has, on all its ranks.
        shard_bytes: bytes of this rank's shards of all of them, in the data type of the weights.
    """

    shape: tuple[int, int]
    number: int
    shard_bytes: float


@functools.lru_cache(maxsize=1 << 10)
def _hidden(strategy: Strategy, shape: ModelShape, precision: str, pp_rank: int) -> list[Matrices]:
    target = _plan(strategy, shape, precision).for_pp_rank(pp_rank).local
    skeleton, found = target.skeleton, list[Matrices]()
    trained = {weight.name: weight for weight in skeleton.weights if weight.is_trained}
    for weight in (trained[name] for name in hidden_matrices(trained)):
        alike, own = len(skeleton.named(weight.name)), math.prod(target.shape(weight))
        *stack, rows, columns = weight.shape
        # Experts that ep has split are sharded over the other axes of fsdp alone.
        shards = strategy.num_shards if strategy.fsdp.degree > 1 else 1
        shards //= strategy.ep.degree if shards > 1 and weight.is_expert else 1
        num_bytes = alike * own * weight.dtype.itemsize / shards
        found.append(Matrices((rows, columns), alike * math.prod(stack), num_bytes))
    return found


@functools.lru_cache(maxsize=1 << 14)
def _held(
    strategy: Strategy, shape: ModelShape, precision: str, is_accumulated: bool, pp_rank: int
) -> StateBytes:
    return _plan(strategy, shape, precision).for_pp_rank(pp_rank).holds(1 + is_accumulated)
