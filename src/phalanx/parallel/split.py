"""The interface of one axis of a strategy, `Split`, and its data types; `plan.Plan` calls it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from phalanx.comm.axes import DENSE, EXPERT, ParameterAxes
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, sent_bytes
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.reduce import GradientReducer
from phalanx.parallel.skeleton import Shape, Skeleton, Weight
from phalanx.strategy import Strategy

if TYPE_CHECKING:
    from phalanx.parallel.batch_norm import Statistics
    from phalanx.parallel.dropout import Masks

Shapes = Mapping[Weight, Shape]
"""Parameter -> shape of the shard that one rank keeps."""

TensorKind = Literal["residual", "heads", "table"]
"""Kind of tensor: `residual`, an activation [B, T, D] between blocks; `heads`, queries, keys or
values [B, T, H] in attention, counted in heads; `table`, a vocabulary table [V, D]."""


@dataclass(frozen=True)
class ParameterSplit:
    """How tp splits a parameter, or the same parameter of several equal blocks.

    Attributes:
        name: name of the parameter, such as `blocks.0-11.mlp.up.weight`.
        role: role of the module that holds the parameter, as patterns of roles write it.
        full, shard: shape of the parameter, and shape of the first rank's shard.
        axes: for each dimension, the sub-axes of tp that split it, outer first.
        tied: other names of the same parameter.
    """

    name: str
    role: str
    full: tuple[int, ...]
    shard: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    tied: tuple[str, ...] = ()

    @property
    def notation(self) -> str:
        """Full shape with the axes that split each dimension, such as `[128_tp_col, 64_tp_row]`."""
        sizes = zip(self.full, self.axes, strict=True)
        return f"[{', '.join('_'.join((str(size), *axes)) for size, axes in sizes)}]"


@dataclass(frozen=True)
class StateBytes:
    """Bytes of training state that one rank holds while it computes the gradients of a step.

    Attributes:
        parameter_bytes: this rank's shard of the parameters.
        gathered_bytes: peak bytes of parameters gathered from all ranks.
        gradient_bytes: gradients that are kept between the microbatches of a step.
        unreduced_bytes: peak bytes of gradients before their reduction, on top of gradient_bytes.
        optimizer_bytes: the two moments of AdamW.
    """

    parameter_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    unreduced_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Target:
    """A model and the strategy that splits it, as one axis sees them.

    Attributes:
        strategy: the strategy.
        skeleton: skeleton of the part of the model that the rank has after the earlier axes.
        compute: dtype of the arithmetic; the dtype of the parameters if None.
        roles: patterns of module names -> roles for tp, see `parallel.tensor.roles`; they have
            precedence over the built-in roles of the model.
        batch_norm: scope of BatchNorm statistics, global or local; each rank's own rows if None.
        masks: dropout masks keyed by sample; None if each rank draws from its own generator.
        run_on_shapes: function that runs a model other than the decoder on the meta device, on a
            microbatch of (rows, positions), to find the shapes that stages send each other.
        pp_rank: coordinate on pp of the ranks that the plan describes.
        num_stages: number of pipeline stages on that rank.
        num_end_stages: number of those stages that are the first or the last one, which read the
            modules outside of blocks; 1 without a pipeline.
        shapes: shapes of the first rank's shards of the parameters that earlier axes have split.
        later: the axes of the strategy that split the model after this one.
        same_rows: whether all ranks have the same rows of a batch, as in generation: the model has
            no gradients. Figures of bytes are of training all the same.
    """

    strategy: Strategy
    skeleton: Skeleton
    compute: torch.dtype | None = None
    roles: Mapping[str, str] | None = None
    batch_norm: Statistics | None = None
    masks: Masks | None = None
    run_on_shapes: Callable[[nn.Module, tuple[int, int]], object] | None = None
    pp_rank: int = 0
    num_stages: int = 1
    num_end_stages: int = 1
    shapes: Shapes = field(default_factory=dict[Weight, tuple[int, ...]])
    later: tuple[type[Split], ...] = ()
    same_rows: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the arithmetic: `compute`, or the dtype of the parameters."""
        return self.compute or self.skeleton.dtype

    def shape(self, weight: Weight) -> Shape:
        """Return the shape of the first rank's shard of a parameter after the earlier axes."""
        return self.shapes.get(weight, weight.shape)

    def axes_of(self, weight: Weight) -> ParameterAxes:
        """Return the sets of axes that sum the gradient of a parameter, and that shard it."""
        return EXPERT if weight.is_expert and self.strategy.ep.degree > 1 else DENSE

    def shard_shape_after_later(self, part: TensorKind, shape: Shape) -> Shape:
        """Return the shape of the first rank's shard of a tensor of kind `part` and of `shape`.

        The shard is the result of all axes after this one.
        """
        for split in self.later:
            shape = split.shard_shape(self.strategy, part, shape)
        return shape

    def sizes(self, *, is_trained: bool = True, axes: ParameterAxes | None = None) -> list[int]:
        """Return the bytes of the first rank's shard of each trained (or each frozen) parameter.

        `axes` selects the parameters with these sets of axes.
        """
        bytes_of = {
            weight: math.prod(self.shape(weight)) * weight.dtype.itemsize
            for weight in self.skeleton.weights
            if weight.is_trained == is_trained and axes in (None, self.axes_of(weight))
        }
        return [bytes_of[each] for each in self.skeleton.parameters() if each in bytes_of]


def entries_of(
    rows: Iterable[tuple[str, str, str, int, int]], num_ranks: Callable[[str], int]
) -> list[Entry]:
    """Return the ledger entries of collectives; rows of one phase, axis and collective are summed.

    Axes of one rank get no entry.

    Args:
        rows: phase, axis, collective, number of calls, bytes of all calls together.
        num_ranks: returns the number of ranks of an axis.
    """
    sums: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for phase, axis, op, calls, payload in rows:
        sums[phase, axis, op][0] += calls
        sums[phase, axis, op][1] += payload
    return [
        Entry(phase, axis, op, calls, payload, sent_bytes(op, payload, num_ranks(axis)))
        for (phase, axis, op), (calls, payload) in sums.items()
        if calls and num_ranks(axis) > 1
    ]


def phases_of(phase: str, recompute: str, is_kept: bool) -> tuple[str, ...]:
    """Return the phases of a step in which a block's collective of `phase` runs.

    Recomputation runs the collectives of forward a second time, in backward. `selective` does not
    repeat a collective if its result `is_kept`, as results of products and attention are.
    """
    kept = ("none", "selective") if is_kept else ("none",)
    return ("forward", "backward") if phase == "forward" and recompute not in kept else (phase,)


class Split:
    """One axis of a strategy on one model; the base class splits nothing.

    The constructor raises a StrategyError if the axis cannot split the model. Only `apply` changes
    a model.
    """

    axis: ClassVar[str]
    """Name of the axis in the strategy."""

    row_shards: int = 1
    position_shards: int = 1
    """Number of equal shards into which the axis splits the rows, and the positions, of a
    microbatch."""

    compiles: ClassVar[bool] = True
    """Whether torch.compile can compile the blocks that the axis has split."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @classmethod
    def applies_to(cls, target: Target) -> bool:
        """Return whether the strategy splits the model by this axis."""
        return getattr(target.strategy, cls.axis).degree > 1

    @classmethod
    def shard_shape(cls, strategy: Strategy, part: TensorKind, shape: Shape) -> Shape:
        """Return the shape of the first rank's shard of a tensor of kind `part` and of `shape`."""
        _ = strategy, part
        return shape

    def local_microbatch(self, microbatch: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and positions of a microbatch on one rank, after this axis's split."""
        return microbatch

    def for_stage(self, target: Target) -> Split:
        """Return the split of the same axis for `target`, another stage of the same model."""
        return type(self)(target)

    def next_target(self) -> Target:
        """Return the target for the next axis."""
        return self.target

    def holds(self, held: StateBytes, accumulation: int) -> StateBytes:
        """Return the bytes on the first rank, given the bytes `held` without this axis.

        A step has `accumulation` microbatches.
        """
        _ = accumulation
        return held

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the communication of the first rank for this axis in one step.

        Args:
            microbatches: rows and positions of each microbatch on this rank, after the splits of
                the earlier axes.
        """
        _ = microbatches
        return []

    def header_traffic(
        self, microbatches: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]
    ) -> list[Entry]:
        """Return the first rank's messages in addition to `traffic`: headers of new shapes.

        Args:
            microbatches: rows and positions of each microbatch of the step on this rank.
            before: the microbatches of all earlier steps.
        """
        _ = microbatches, before
        return []

    def table(self) -> list[ParameterSplit]:
        """Return how each parameter is split; empty if the axis treats all parameters equally."""
        return []

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Split the model in place; the model may be on the meta device."""

    def reducer(
        self, model: nn.Module, comm: Ranks, inner: GradientReducer | None
    ) -> GradientReducer | None:
        """Return the reducer of the model's gradients.

        Args:
            model: the model, split, with its initial weights.
            comm: communicator of the strategy.
            inner: reducer over the later axes in `plan.SPLITS`; it runs first. None without one.
        """
        _ = model, comm
        return inner

    def runner(self, model: nn.Module, comm: Ranks, runner: Runner) -> Runner:
        """Return the runner of the model: `runner`, or one that replaces it."""
        _ = model, comm
        return runner
