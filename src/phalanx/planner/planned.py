"""A step that is to be planned: the model, its split, its batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.account.parameters import num_parameters
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan, plan_decoder
from phalanx.planner.recipe import STATE_BYTES
from phalanx.strategy import Strategy


@dataclass(frozen=True)
class PlannedStep:
    """A step of a strategy.

    Attributes:
        microbatch: sequences in one forward pass of one rank.
        accumulation: microbatches of one step.
        precision: data type of the arithmetic.
        has_documents: several documents stand in a row.
    """

    shape: ModelShape
    strategy: Strategy
    seq_len: int
    microbatch: int
    accumulation: int
    precision: str = "bfloat16"
    has_documents: bool = False

    @property
    def num_sequences(self) -> int:
        """Sequences of a step of the whole job."""
        replicas = self.strategy.dp.degree * self.strategy.fsdp.degree
        return self.microbatch * self.accumulation * replicas

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, each once."""
        return num_parameters(self.shape).total

    @property
    def state_bytes(self) -> float:
        """Of a parameter: it, its gradient and two moments, 32 bits each."""
        return STATE_BYTES


def plan_of(planned: PlannedStep) -> Plan[Any]:
    """Return the plan of a planned: the value that `train` builds from it.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    return _plan(planned.strategy, planned.shape, planned.precision)


@functools.lru_cache(maxsize=1024)
def _plan(strategy: Strategy, shape: ModelShape, precision: str) -> Plan[Any]:
    compute: torch.dtype = getattr(torch, precision)
    master = torch.promote_types(compute, torch.float32)
    return plan_decoder(strategy, shape, master, compute)
