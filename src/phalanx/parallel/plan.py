"""Decide how a strategy splits a model, or refuse it, before any process starts."""

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

from phalanx.comm.axes import axes_of
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry, Tally
from phalanx.comm.row_counts import RowCounts
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
from phalanx.parallel.expert_split import ExpertSplit
from phalanx.parallel.pipeline.cut import chain_flops
from phalanx.parallel.pipeline.partition import stage_costs
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.pipeline.split import PipelineSplit
from phalanx.parallel.recompute import RecomputeSplit
from phalanx.parallel.reduce import GradientReducer, is_fused
from phalanx.parallel.sharded import ShardedSplit
from phalanx.parallel.skeleton import Skeleton, skeleton_of, skeleton_of_shape
from phalanx.parallel.split import ParameterSplit, Split, StateBytes, Target, entries_of
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.strategy import Strategy, refuse_servers, require_built

Model = TypeVar("Model", bound=nn.Module)

FirstWeights = Callable[[Tensor, str, tuple[int, ...], tuple[int, ...]], object]
"""Fills a shard of a parameter in place: (shard, name, full shape, offset of the shard in it)."""

SPLITS: tuple[type[Split], ...] = (
    *(PipelineSplit, BatchNormSplit, ContextSplit, TensorSplit, ExpertSplit),
    *(RecomputeSplit, ShardedSplit, DataSplit, DropoutSplit),
)
"""The axes, in the order in which they split a model: each splits the result of the previous one.

pp comes first, so the later axes see a stage as a complete model. cp splits the positions of each
row, and tp splits the products over those positions. ep deals the experts, each of which tp has
split, to ranks with different samples. Recomputation wraps blocks that these have split, and fsdp
gathers a block before its recomputation runs.
"""


class Plan(Generic[Model]):
    """A strategy applied to a model: the bytes a rank holds and sends, and the splits of the model.

    The constructor makes all decisions; only `apply` and `build` change the model. With a pipeline,
    the plan describes the ranks at coordinate `pp_rank` of pp. For the arguments see `Target`.

    Attributes:
        local: the target that all axes leave; fsdp, which splits last, keeps its shapes.

    Raises:
        StrategyError: the strategy uses a feature that is not implemented, or the model does not
            allow the strategy.
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
        same_rows: bool = False,
    ) -> None:
        """Resolve the strategy; `make` returns the model that a skeleton describes."""
        require_built(strategy)
        check_statistics(batch_norm)
        self.strategy = strategy
        skeleton = model if isinstance(model, Skeleton) else skeleton_of(model)
        self._make = make or (lambda: cast(Model, skeleton.model))
        whole = Target(strategy, skeleton, compute, roles, batch_norm, masks, run_on_shapes)
        self._whole = dataclasses.replace(whole, same_rows=same_rows)
        self._types = [split for split in SPLITS if split.applies_to(self._whole)]
        self._resolve(self._types, pp_rank)

    def _resolve(self, makers: Sequence[Callable[[Target], Split]], pp_rank: int) -> None:
        """Make the split of each axis, given the target that the axes before it leave."""
        target = dataclasses.replace(self._whole, pp_rank=pp_rank)
        self._splits: list[Split] = []
        for number, make in enumerate(makers, 1):
            later = tuple(self._types[number:])
            self._splits.append(make(dataclasses.replace(target, later=later)))
            target = self._splits[-1].next_target()
        self.local = target
        self._unsharded = data.replicated_bytes(target.sizes(), sum(target.sizes(is_trained=False)))

    def for_pp_rank(self, pp_rank: int) -> Plan[Model]:
        """Return the plan of the ranks at coordinate `pp_rank` of pp."""
        other = copy.copy(self)
        other._resolve([split.for_stage for split in self._splits], pp_rank)
        return other

    @functools.cached_property
    def model(self) -> Model:
        """The model that `build` splits; made at the first access."""
        return self._make()

    @property
    def row_shards(self) -> int:
        """Number of shards into which the rows of a microbatch are split."""
        return math.prod(split.row_shards for split in self._splits)

    @property
    def position_shards(self) -> int:
        """Number of equal shards into which the positions of a row must divide."""
        return math.prod(split.position_shards for split in self._splits)

    @property
    def uncompilable_axes(self) -> str:
        """Names of the axes whose split blocks torch.compile cannot compile, joined by commas."""
        return ", ".join(split.axis for split in self._splits if not split.compiles)

    @property
    def layout(self) -> Layout | None:
        """Tensor-parallel layout of the first rank of tp; None without tp."""
        return next((s.layout for s in self._splits if isinstance(s, TensorSplit)), None)

    @property
    def order(self) -> PositionOrder | None:
        """Assignment of positions to the ranks of cp; None without cp."""
        found = (s.attention.order for s in self._splits if isinstance(s, ContextSplit))
        return next(found, None)

    @property
    def cut(self) -> Sequence[range] | None:
        """The links (layers) of the model in each pipeline stage; None without pp."""
        return next((s.chain.cut for s in self._splits if isinstance(s, PipelineSplit)), None)

    @property
    def stage_parts(self) -> list[list[float]]:
        """Layers of each pp coordinate, and for a decoder FLOPs per token; empty without pp.

        The time of a small layer does not follow from its FLOPs, so neither alone is what a stage
        may take.
        """
        shape, cut, schedule = self._whole.skeleton.shape, self.cut, self.schedule(1)
        if cut is None or schedule is None:
            return []
        of_stages = [[float(len(links)) for links in cut]]
        if shape is not None:
            of_stages.append(stage_costs(chain_flops(shape), cut))
        ranks = range(len(schedule.orders))
        return [
            [sum(of[at] for at in schedule.stages_of(rank)) for rank in ranks] for of in of_stages
        ]

    def schedule(self, num_microbatches: int) -> Schedule | None:
        """Return the pipeline schedule of a step, the actions of each rank; None without pp."""
        found = (s.schedule(num_microbatches) for s in self._splits if isinstance(s, PipelineSplit))
        return next(found, None)

    def holds(self, accumulation: int = 1) -> StateBytes:
        """Return the bytes of training state on the first rank, for `accumulation` microbatches."""
        held = self._unsharded
        for split in self._splits:
            held = split.holds(held, accumulation)
        return held

    def traffic(
        self, microbatches: Sequence[tuple[int, int]], routed: Sequence[RowCounts] | None = None
    ) -> list[Entry]:
        """Return the first rank's communication in a step of microbatches of (rows, positions).

        Bytes of ep are expected ones, of even routing, unless the step's counts are known, `routed`
        (comm.row_counts.noted).
        """
        entries = self._split_traffic(microbatches, routed)
        shape = self._whole.skeleton.shape
        experts = None if shape is None else shape.experts
        if shape is None or experts is None:
            return entries
        # train/balance.py: loads are counted by forwards of their own, and summed over ranks.
        if experts.needs_first_pass(len(microbatches), self.strategy.pp.degree):
            for number, microbatch in enumerate(microbatches):
                known = routed if number == 0 or routed is None else ()  # of all microbatches
                of_forward = self._split_traffic([microbatch], known)
                entries += [entry for entry in of_forward if entry.phase == "forward"]
        if experts.needs_loads:
            degrees = self.strategy.mesh_axes()
            num_bytes = 8 * shape.num_layers * (2 * experts.num_experts + 2)
            rows = [
                ("balance", axis, "all_reduce", 1, num_bytes) for axis in axes_of("loss", degrees)
            ]
            entries += entries_of(rows, degrees.__getitem__)
        return Tally(entries).entries()

    def _split_traffic(
        self, microbatches: Sequence[tuple[int, int]], routed: Sequence[RowCounts] | None
    ) -> list[Entry]:
        entries: list[Entry] = []
        for split in self._splits:
            if isinstance(split, ExpertSplit) and routed is not None:
                entries += split.traffic_of(routed)
            else:
                entries += split.traffic(microbatches)
            microbatches = [split.local_microbatch(microbatch) for microbatch in microbatches]
        return entries

    def exchange_bounds(self, microbatches: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return the least and the most bytes that a rank sends in all-to-alls of ep in a step."""
        for split in self._splits:
            if isinstance(split, ExpertSplit):
                low, high = (
                    sum(each.sent_bytes for each in entries if each.op == "all_to_all")
                    for entries in split.bounds(microbatches)
                )
                return low, high
            microbatches = [split.local_microbatch(microbatch) for microbatch in microbatches]
        return 0.0, 0.0

    def header_traffic(
        self, microbatches: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]
    ) -> list[Entry]:
        """Return the messages in addition to `traffic` that announce shapes new in this step.

        They are the messages of the first rank. Both arguments are microbatches of (rows,
        positions): of this step, and (`before`) of all earlier steps.
        """
        return [
            each for split in self._splits for each in split.header_traffic(microbatches, before)
        ]

    def table(self) -> list[ParameterSplit]:
        """Return how tp splits each parameter, a row for each; empty without tp."""
        return [row for split in self._splits for row in split.table()]

    def apply(self, comm: Ranks | CountingComm) -> None:
        """Split the model in place; a `CountingComm` splits a meta-device model without ranks."""
        for split in self._splits:
            split.apply(self.model, cast(Ranks, comm))

    def build(self, comm: Ranks, first_weights: FirstWeights | None = None) -> Runner:
        """Split the model in place and return its runner; every rank calls this once, together.

        Args:
            comm: `Ranks(strategy)`.
            first_weights: function that initializes the shards of a model on the meta device, so
                that no rank ever holds a full parameter. None if the model already has its initial
                weights on a real device.

        Returns:
            The runner, which runs the microbatches of a step and reduces the gradients.
        """
        refuse_servers(self.strategy, "a plan")
        model = self.model
        before = dict(model.named_parameters(remove_duplicate=False))
        self.apply(comm)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in before and parameter is not before[name]:
                # Keep attributes that a user has set, such as a mark that selects an optimizer
                # parameter group.
                attached: dict[str, Any] = vars(before[name])
                vars(parameter).update(attached | vars(parameter))
        if first_weights is not None:
            model.to_empty(device=comm.device)
            for name, parameter in (*model.named_parameters(), *model.named_buffers()):
                if is_fused(parameter):
                    raise StrategyError(
                        f"tp: '{name}' contains several maps, each split separately, so a rank's "
                        "shard has no single offset in the full parameter; pass the model with its "
                        "initial weights, not on the meta device"
                    )
                shard, offset = shard_of(parameter)
                if shard.numel():
                    first_weights(shard, name, tuple(parameter.shape), offset)
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
    *,
    same_rows: bool = False,
) -> Plan[Decoder]:
    """Return the plan of a decoder on the meta device; for the dtypes see `Decoder.on_meta`."""
    skeleton = skeleton_of_shape(shape, master, compute)
    make = functools.partial(Decoder.on_meta, shape, master, compute)
    options: dict[str, Any] = {"compute": compute, "pp_rank": pp_rank, "same_rows": same_rows}
    return Plan(strategy, skeleton, make=make, **options)


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of a parameter, detached, and its offset in the full parameter.

    A shard is empty on some ranks if the parameter has fewer rows than there are ranks.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    return tensor.to_local(), _shard_offset(tensor.shape, tensor.device_mesh, tensor.placements)


@functools.lru_cache(maxsize=1024)
def _shard_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Return the offset of this rank's shard, which torch takes up to 1 ms to compute; cached."""
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])
