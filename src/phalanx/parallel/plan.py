"""How one strategy splits one model: decided, and refused, before any process starts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Private module of a function that PyTorch documents; tests/parallel/test_sharded.py pins it.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import Counting
from phalanx.comm.ledger import Entry
from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel import data
from phalanx.parallel.accumulate import Accumulate, Runner
from phalanx.parallel.batch_norm import BatchNormSplit, Statistics, check_statistics
from phalanx.parallel.context.positions import PositionOrder
from phalanx.parallel.context.split import ContextSplit
from phalanx.parallel.data import DataSplit
from phalanx.parallel.dropout import DropoutSplit, Masks
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.pipeline.split import PipelineSplit
from phalanx.parallel.recompute import RecomputeSplit
from phalanx.parallel.reduce import GradientReducer, is_fused
from phalanx.parallel.sharded import ShardedSplit
from phalanx.parallel.skeleton import Skeleton, skeleton_of, skeleton_of_shape
from phalanx.parallel.split import Row, Split, StateBytes, Target
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.strategy import Strategy, refuse_servers, require_built

Model = TypeVar("Model", bound=nn.Module)

FirstWeights = Callable[[Tensor, str, tuple[int, ...], tuple[int, ...]], object]
"""Fills a shard of a parameter: (shard, name, full shape, where the shard begins in it)."""

SPLITS: tuple[type[Split], ...] = (
    *(PipelineSplit, BatchNormSplit, ContextSplit, TensorSplit),
    *(RecomputeSplit, ShardedSplit, DataSplit, DropoutSplit),
)
"""The axes, in the order in which they split a model: each splits what those before it leave.

A stage of a pipeline is a model of its own to the others. Of its rows cp leaves positions, and tp
multiplies them. Recomputation runs again what tp has made of a block, and fsdp gathers a block
before that.
"""


class Plan(Generic[Model]):
    """A strategy on a model: what a rank holds and sends, and how the model is split.

    It is resolved once, when it is made, and then asked; `build` alone changes the model. Of a
    pipeline it is a plan of the ranks at `pp_rank`. For the arguments see `Target`.

    Raises:
        StrategyError: a part of the strategy is not built yet, or the model does not allow it.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: Model | Skeleton,
        *,
        compute: torch.dtype | None = None,
        roles: Mapping[str, str] | None = None,
        batch_norm: Statistics | None = None,
        masks: Masks | None = None,
        run_on_shapes: Callable[[nn.Module, tuple[int, int]], object] | None = None,
        pp_rank: int = 0,
        make: Callable[[], Model] | None = None,
    ) -> None:
        """Resolve the strategy; `make` returns the model that a skeleton is of."""
        require_built(strategy)
        check_statistics(batch_norm)
        self.strategy = strategy
        skeleton = model if isinstance(model, Skeleton) else skeleton_of(model)
        self._make = make or (lambda: cast(Model, skeleton.model))
        self._whole = Target(strategy, skeleton, compute, roles, batch_norm, masks, run_on_shapes)
        self._types = [split for split in SPLITS if split.is_asked(self._whole)]
        self._resolve(self._types, pp_rank)

    def _resolve(self, makers: Sequence[Callable[[Target], Split]], pp_rank: int) -> None:
        """Ask each axis to split what those before it leave."""
        target = dataclasses.replace(self._whole, pp_rank=pp_rank)
        self._splits: list[Split] = []
        for number, make in enumerate(makers, 1):
            later = tuple(self._types[number:])
            self._splits.append(make(dataclasses.replace(target, later=later)))
            target = self._splits[-1].remaining()
        self._unsharded = data.layout(target.sizes(), sum(target.sizes(is_trained=False)))

    def of(self, pp_rank: int) -> Plan[Model]:
        """Return the plan of the ranks of another stage."""
        other = copy.copy(self)
        other._resolve([split.of for split in self._splits], pp_rank)
        return other

    @functools.cached_property
    def model(self) -> Model:
        """The model, to be split by `build`."""
        return self._make()

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

    @property
    def layout(self) -> Layout | None:
        """How tp splits tensors, on the first of its ranks; None without tp."""
        return next((s.layout for s in self._splits if isinstance(s, TensorSplit)), None)

    @property
    def order(self) -> PositionOrder | None:
        """Which positions the ranks of cp hold; None without cp."""
        found = (s.attention.order for s in self._splits if isinstance(s, ContextSplit))
        return next(found, None)

    @property
    def cut(self) -> Sequence[range] | None:
        """The links of the model in each stage; None without pp."""
        return next((s.chain.cut for s in self._splits if isinstance(s, PipelineSplit)), None)

    def schedule(self, num_microbatches: int) -> Schedule | None:
        """Return what each rank of pp does in a step; None without pp."""
        found = (s.schedule(num_microbatches) for s in self._splits if isinstance(s, PipelineSplit))
        return next(found, None)

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

        Both are microbatches of (rows, positions), `before` the microbatches of all earlier steps.
        """
        return [each for split in self._splits for each in split.announces(microbatches, before)]

    def table(self) -> list[Row]:
        """Return what tp does to each parameter; empty without tp."""
        return [row for split in self._splits for row in split.table()]

    def apply(self, comm: Ranks | Counting) -> None:
        """Split the model, in place; on the meta device by ranks that need not exist."""
        for split in self._splits:
            split.apply(self.model, cast(Ranks, comm))

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
        refuse_servers(self.strategy, "a plan")
        model = self.model
        before = dict(model.named_parameters(remove_duplicate=False))
        self.apply(comm)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in before and parameter is not before[name]:
                # What a user has attached, as a mark that an optimizer's groups go by.
                attached: dict[str, Any] = vars(before[name])
                vars(parameter).update(attached | vars(parameter))
        if first_weights is not None:
            model.to_empty(device=comm.device)
            _fill(model, first_weights)
        reducer: GradientReducer | None = None
        for split in reversed(self._splits):
            reducer = split.reducer(model, comm, reducer)
        runner: Runner = Accumulate(reducer)
        for split in reversed(self._splits):
            runner = split.runner(model, comm, runner)
        return runner


def plan_decoder(
    strategy: Strategy,
    shape: ModelShape,
    master: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    pp_rank: int = 0,
) -> Plan[Decoder]:
    """Return the plan of a decoder on the meta device, whose parameters are of type `master`."""

    def make() -> Decoder:
        with torch.device("meta"):
            model = Decoder(shape).to(dtype=master)
        model.compute_dtype = compute
        return model

    skeleton = skeleton_of_shape(shape, master)
    return Plan(strategy, skeleton, compute=compute, pp_rank=pp_rank, make=make)


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
