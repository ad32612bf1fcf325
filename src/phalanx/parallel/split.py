"""What each way to split the work answers, as `plan.Plan` asks it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

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
"""The shape of what one rank keeps of each parameter."""

Part = Literal["residual", "heads", "table"]
"""An activation [B, T, D] between blocks; queries, keys or values [B, T, H] in attention, counted
in heads; a table of the vocabulary [V, D]."""


@dataclass(frozen=True)
class Row:
    """What happens to a parameter, or to the alike parameters of several blocks.

    Attributes:
        name: as in `blocks.0-11.mlp.up.weight`.
        role: of the module that holds it, as a pattern says it.
        full, shard: its shape, and the shape of the first rank's shard.
        axes: of each dimension, the sub-axes of tp that split it, outer first.
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
        """Its shape with the axes that split it, as in `[128_tp_col, 64_tp_row]`."""
        sizes = zip(self.full, self.axes, strict=True)
        return f"[{', '.join('_'.join((str(size), *axes)) for size, axes in sizes)}]"


@dataclass(frozen=True)
class StateBytes:
    """Bytes of trained state that one rank holds while it computes the gradients of a step.

    Attributes:
        parameter_bytes: this rank's shard of the parameters.
        gathered_bytes: parameters gathered from other ranks, at most at one time.
        gradient_bytes: gradients, from microbatch to microbatch.
        unreduced_bytes: peak bytes of not yet reduced gradients, on top of gradient_bytes.
        optimizer_bytes: the two moments of AdamW.
    """

    parameter_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    unreduced_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Target:
    """A model, and how it is to be split.

    Attributes:
        strategy: how.
        skeleton: of what the axes before this one leave the rank of the model.
        compute: data type of the arithmetic; the parameters' if None.
        roles: patterns of module names to roles for tp, see `parallel.tensor.roles`; they come
            before those that are known for the model.
        batch_norm: over what BatchNorm takes its statistics; over a rank's own rows if None.
        masks: of the nn.Dropouts; None if each draws from its process's generator.
        run_on_shapes: of a model that is no decoder, runs it on the meta device on a microbatch of
            (rows, positions), so that it is known what stages send each other.
        pp_rank: coordinate on pp of the rank whose shards are meant.
        num_stages: how many stages that rank runs of the model.
        num_ends: how many of them are the first or the last, which read the modules in no block;
            1 where the model is not cut.
        shapes: what the axes before this one leave the first rank of those parameters that they
            have split.
        later: the axes of the strategy that split the model after this one.
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
    num_ends: int = 1
    shapes: Shapes = field(default_factory=dict[Weight, tuple[int, ...]])
    later: tuple[type[Split], ...] = ()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Data type of the arithmetic."""
        return self.compute or self.skeleton.dtype

    def shape(self, weight: Weight) -> Shape:
        """Return the shape of the first rank's shard of a parameter."""
        return self.shapes.get(weight, weight.shape)

    def left_by_later(self, part: Part, shape: Shape) -> Shape:
        """Return the shape of the first rank's shard of a part of the model of `shape`.

        The axes after this one split it.
        """
        for split in self.later:
            shape = split.shard_shape(self.strategy, part, shape)
        return shape

    def sizes(self, *, is_trained: bool = True) -> list[int]:
        """Return the bytes of the first rank's shard of each parameter that is trained, or not."""
        bytes_of = {
            weight: math.prod(self.shape(weight)) * weight.dtype.itemsize
            for weight in self.skeleton.weights
            if weight.is_trained == is_trained
        }
        return [bytes_of[each] for each in self.skeleton.parameters() if each in bytes_of]


def entries_of(
    rows: Iterable[tuple[str, str, str, int, int]], num_ranks: Callable[[str], int]
) -> list[Entry]:
    """Return the entries of collectives, alike ones added up, and none over an axis of one rank.

    A row has the phase, the axis, the collective, the number of calls and the bytes of all of them;
    `num_ranks` returns how many ranks an axis has.
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

    `selective` keeps the results of products and of attention, and does not send for them again.
    """
    kept = ("none", "selective") if is_kept else ("none",)
    return ("forward", "backward") if phase == "forward" and recompute not in kept else (phase,)


class Split:
    """One axis of a strategy on one model; this one does nothing.

    A constructor refuses, with a StrategyError, a model that the axis cannot split. `apply` alone
    changes a model.
    """

    axis: ClassVar[str]
    """Its name in the strategy."""

    row_shards: int = 1
    position_shards: int = 1
    """In how many equal shards it splits the rows, and the positions, of a microbatch."""

    compiles: ClassVar[bool] = True
    """Whether torch.compile takes the blocks that it has split."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @classmethod
    def is_asked(cls, target: Target) -> bool:
        """Return whether a model is split by this axis."""
        return getattr(target.strategy, cls.axis).degree > 1

    @classmethod
    def shard_shape(cls, strategy: Strategy, part: Part, shape: Shape) -> Shape:
        """Return the shape of the first rank's shard of a part of a model, which is of `shape`."""
        _ = strategy, part
        return shape

    def leaves(self, microbatch: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and positions of a microbatch that it leaves to the axes after it."""
        return microbatch

    def of(self, target: Target) -> Split:
        """Return this axis on another stage of the same model."""
        return type(self)(target)

    def remaining(self) -> Target:
        """Return what this axis leaves the axes after it to split."""
        return self.target

    def holds(self, held: StateBytes, accumulation: int) -> StateBytes:
        """Return what the first rank holds, given what it would without this axis.

        A step has `accumulation` microbatches.
        """
        _ = accumulation
        return held

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return what the first rank sends for this axis in one step.

        Args:
            microbatches: rows and positions that the axes before this one leave of each of this
                rank's microbatches.
        """
        _ = microbatches
        return []

    def announces(
        self, microbatches: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]
    ) -> list[Entry]:
        """Return what the first rank sends in a step besides: headers of shapes that are new.

        Args:
            microbatches: rows and positions of each of this rank's microbatches of the step.
            before: the microbatches of all earlier steps.
        """
        _ = microbatches, before
        return []

    def table(self) -> list[Row]:
        """Return what it does to each parameter, as far as that differs between parameters."""
        return []

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Split the model, in place; it may be on the meta device."""

    def reducer(
        self, model: nn.Module, comm: Ranks, inner: GradientReducer | None
    ) -> GradientReducer | None:
        """Return what reduces the gradients of a model.

        Args:
            model: now split, with its first weights.
            comm: of the strategy.
            inner: what reduces them over the axes within this one's reach: those after it in
                `plan.SPLITS`.
        """
        _ = model, comm
        return inner

    def runner(self, model: nn.Module, comm: Ranks, runner: Runner) -> Runner:
        """Return what runs the model, where that is not `runner`."""
        _ = model, comm
        return runner
