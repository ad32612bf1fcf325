"""A training step to plan: model, strategy and batch."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Final

import torch

from phalanx.account.parameters import num_parameters
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan, plan_decoder
from phalanx.strategy import Axis, Strategy

STATE_BYTES: Final = 16
"""Bytes per parameter: value, gradient and the two moments of AdamW, 32 bits each."""

PURE, PURE_BYTES = "pure-bfloat16", 8
"""A precision that `train` does not support, and its bytes per parameter: all four in 16 bits."""


@dataclass(frozen=True)
class PlannedStep:
    """A training step of a decoder under a strategy.

    Attributes:
        microbatch: sequences in one forward pass of one rank.
        accumulation: microbatches of one step.
        precision: data type of the arithmetic.
        has_documents: whether a sequence packs several documents.
    """

    shape: ModelShape
    strategy: Strategy
    seq_len: int
    microbatch: int
    accumulation: int
    precision: str = "bfloat16"
    has_documents: bool = False

    @property
    def with_one_data_axis(self) -> PlannedStep:
        """The step with dp in fsdp, if the strategy has fsdp: its operations are the same."""
        strategy = self.strategy
        if strategy.fsdp.degree == 1:
            return self
        fsdp = Axis(strategy.data_ranks, Strategy.fsdp.kind)
        return dataclasses.replace(
            self, strategy=dataclasses.replace(strategy, dp=Strategy.dp, fsdp=fsdp)
        )

    @property
    def num_sequences(self) -> int:
        """Sequences of one step over all ranks."""
        replicas = self.strategy.dp.degree * self.strategy.fsdp.degree
        return self.microbatch * self.accumulation * replicas

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters of the model."""
        return num_parameters(self.shape).total

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter: its value, its gradient and two moments, 32 bits each."""
        return STATE_BYTES


def plan_of(planned: PlannedStep) -> Plan[Any]:
    """Return the plan that `train` would build for the step.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    return _plan(planned.strategy, planned.shape, planned.precision)


@functools.lru_cache(maxsize=1024)
def _plan(strategy: Strategy, shape: ModelShape, precision: str) -> Plan[Any]:
    compute: torch.dtype = getattr(torch, precision)
    master = torch.promote_types(compute, torch.float32)
    return plan_decoder(strategy, shape, master, compute)
