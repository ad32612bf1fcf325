"""How one strategy splits one model: decided, and refused, before any process starts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Private module of a function that PyTorch documents; tests/parallel/test_sharded.py pins it.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry
from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel import data
from phalanx.parallel.accumulate import Accumulate, Runner
from phalanx.parallel.context.split import ContextSplit
from phalanx.parallel.data import DataSplit
from phalanx.parallel.pipeline.split import PipelineSplit
from phalanx.parallel.recompute import RecomputeSplit
from phalanx.parallel.reduce import GradientReducer, is_fused
from phalanx.parallel.sharded import ShardedSplit
from phalanx.parallel.split import Row, Split, StateBytes, Target
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.strategy import Strategy, require_built

Model = TypeVar("Model", bound=nn.Module)

FirstWeights = Callable[[Tensor, str, tuple[int, ...], tuple[int, ...]], object]
"""Fills a shard of a parameter: (shard, name, full shape, where the shard begins in it)."""

SPLITS: tuple[type[Split], ...] = (
    *(ContextSplit, PipelineSplit, TensorSplit),
    *(RecomputeSplit, ShardedSplit, DataSplit),
)
"""The axes, in the order in which they split a model: each splits what those before it leave.

Stages of a pipeline send the positions that cp leaves, and tp multiplies them. Recomputation runs
again what tp has made of a block, and fsdp gathers a block before that.
"""


class Plan(Generic[Model]):
    """A strategy on a model: what a rank holds and sends, and how the model is split.

    Of a pipeline it is a plan of the ranks at `pp_rank`, and leaves them their stages of the model.
    For the arguments see `Target`.

    Raises:
        StrategyError: a part of the strategy is not built yet, or the model does not allow it.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: Model,
        *,
        compute: torch.dtype | None = None,
        roles: Mapping[str, str] | None = None,
        pp_rank: int = 0,
    ) -> None:
        require_built(strategy)
        self.strategy = strategy
        self.model = model
        target = Target(strategy, model, compute, roles, pp_rank)
        self._splits: list[Split] = []
        asked = [split for split in SPLITS if split.is_asked(strategy)]
        for number, split in enumerate(asked, 1):
            self._splits.append(split(dataclasses.replace(target, later=tuple(asked[number:]))))
            target = self._splits[-1].remaining()
        self._unsharded = data.layout(target.sizes(), sum(target.sizes(is_trained=False)))

    @property
    def row_shards(self) -> int:
        """In how many shards the rows of a microbatch are split."""
        return math.prod(split.row_shards for split in self._splits)

    @property
    def position_shards(self) -> int:
        """In how many shards the positions of a row are split, where they have to be equal."""
        return math.prod(split.position_shards for split in self._splits)

    @property
    def uncompiled(self) -> str:
        """The axes that make of blocks what torch.compile does not take, as text."""
        return ", ".join(split.axis for split in self._splits if not split.compiles)

    def holds(self, accumulation: int = 1) -> StateBytes:
        """Return what the first rank holds of the trained state."""
        held = self._unsharded
        for split in self._splits:
            held = split.holds(held, accumulation)
        return held

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return what the first rank sends in one step, of microbatches of (rows, positions)."""
        entries: list[Entry] = []
        for split in self._splits:
            entries += split.traffic(microbatches)
            microbatches = [split.leaves(microbatch) for microbatch in microbatches]
        return entries

    def announces(
        self, microbatches: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]
    ) -> list[Entry]:
        """Return what the first rank sends besides `traffic`, for shapes that are new in a step.

        Both are microbatches of (rows, positions), `before` those of all earlier steps.
        """
        return [each for split in self._splits for each in split.announces(microbatches, before)]

    def table(self) -> list[Row]:
        """Return what tp does to each parameter; empty without tp."""
        return [row for split in self._splits for row in split.table()]

    def build(self, comm: Ranks, first_weights: FirstWeights | None = None) -> Runner:
        """Split the model, in place; every rank calls this together, once.

        Args:
            comm: `Ranks(strategy)`.
            first_weights: what fills the parameters of a model on the meta device: each rank makes
                its own shards alone, and never holds the whole. A model that is elsewhere has its
                first weights already.

        Returns:
            What runs the model and reduces the gradients.
        """
        before = dict(self.model.named_parameters(remove_duplicate=False))
        for split in self._splits:
            split.apply(comm)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in before and parameter is not before[name]:
                # What a user has attached, as a mark that an optimizer's groups go by.
                attached: dict[str, Any] = vars(before[name])
                vars(parameter).update(attached | vars(parameter))
        if first_weights is not None:
            self.model.to_empty(device=comm.device)
            _fill(self.model, first_weights)
        reducer: GradientReducer | None = None
        for split in reversed(self._splits):
            reducer = split.reducer(comm, reducer)
        runner: Runner = Accumulate(reducer)
        for split in reversed(self._splits):
            runner = split.runner(comm, runner)
        return runner


def plan_decoder(
    strategy: Strategy,
    shape: ModelShape,
    master: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    pp_rank: int = 0,
) -> Plan[Decoder]:
    """Return the plan of a decoder on the meta device, whose parameters are of type `master`."""
    with torch.device("meta"):
        model = Decoder(shape).to(dtype=master)
    model.compute_dtype = compute
    return Plan(strategy, model, compute=compute, pp_rank=pp_rank)


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of a parameter, without gradient, and where it begins in the whole.

    A shard may be empty: rows that are fewer than ranks leave some ranks without.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    return tensor.to_local(), _begin(tensor.shape, tensor.device_mesh, tensor.placements)


@functools.lru_cache(maxsize=1024)
def _begin(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Return where this rank's shard begins, which torch takes up to a millisecond to work out."""
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def _fill(model: nn.Module, first_weights: FirstWeights) -> None:
    for name, parameter in model.named_parameters():
        if is_fused(parameter):
            raise StrategyError(
                f"tp: '{name}' holds several maps, each split by itself, so that a rank's shard "
                "has no one place in the whole; give the model with its first weights, not on the "
                "meta device"
            )
        shard, offset = shard_of(parameter)
        if shard.numel():
            first_weights(shard, name, tuple(parameter.shape), offset)
