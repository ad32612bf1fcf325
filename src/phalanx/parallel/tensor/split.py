"""The `Split` of axis tp: it resolves the roles and shards of a model's parameters once."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence

from torch import nn

from phalanx.comm.algorithms.steps import runs_of
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.reduce import GradientReducer, ReplicaReducer
from phalanx.parallel.split import ParameterSplit, Shape, Split, Target, TensorKind
from phalanx.parallel.tensor import account, apply
from phalanx.parallel.tensor.check import check
from phalanx.parallel.tensor.placed import sharded_parameters
from phalanx.parallel.tensor.roles import bind_roles
from phalanx.strategy import Strategy


class TensorSplit(Split):
    """Tensor parallelism in the layout that the strategy selects.

    `layout` is for planning: its communicator counts and has no process groups. `apply` creates
    the layout that runs.
    """

    axis = "tp"
    compiles = False  # the products are custom operators

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.layout = apply.layout_of(target.strategy)
        self.bindings = bind_roles(target.skeleton.model, target.roles)
        self.placed = sharded_parameters(target.skeleton, self.bindings, self.layout)
        self.row_shards = self.layout.residual.num_shards(0, self.layout.comm)
        check(self.bindings, self.placed, self.layout, target.strategy)

    def for_stage(self, target: Target) -> TensorSplit:
        """Return a split with the same roles for the parameters of another pipeline stage."""
        other = copy.copy(self)
        other.target = target
        other.placed = sharded_parameters(target.skeleton, self.bindings, self.layout)
        return other

    @classmethod
    def shard_shape(cls, strategy: Strategy, part: TensorKind, shape: Shape) -> Shape:
        """Return the shape of the first rank's shard; rows are padded, and positions if split."""
        layout = apply.layout_of(strategy)
        if part == "table":
            return layout.column.shard_shape(shape, layout.comm)
        num_rows, length, size = shape
        batch = BatchShape(num_rows, length)
        if part == "residual":
            return tuple(map(len, layout.shard_ranges(layout.residual, batch, size)))
        num_shards = layout.column.num_shards(0, layout.comm)
        return len(layout.rows(layout.inner, batch)), length, size // num_shards

    def next_target(self) -> Target:
        """Return the target with the shard shapes of all parameters."""
        shapes = {row.weight: row.shard_shape for row in self.placed}
        return dataclasses.replace(self.target, shapes=shapes)

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the communication of the layers and of the gradients of replicated parameters."""
        batches = [BatchShape(*microbatch) for microbatch in microbatches]
        return account.traffic(self.target, self.layout, self.bindings, self.placed, batches)

    def table(self) -> list[ParameterSplit]:
        """Return a row for each parameter, with its shard and the axes that split it.

        Parameters whose names differ only in the block number, the first number in the name, share
        one row.
        """
        numbers: dict[ParameterSplit, list[int]] = {}
        for each in self.placed:
            weight = each.weight
            matches = map(_NUMBER.search, self.target.skeleton.named(weight.name))
            name, role = _NUMBER.sub("*", weight.name, count=1), each.binding.text
            sizes = weight.shape, each.shard_shape, each.spec.axes
            row = ParameterSplit(name, role, *sizes, tied=weight.names[1:])
            numbers.setdefault(row, []).extend(int(match[0]) for match in matches if match)
        return [
            dataclasses.replace(row, name=row.name.replace("*", _text_of(of_row), 1))
            for row, of_row in numbers.items()
        ]

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Replace parameters by shards, and forwards by tensor-parallel ones."""
        layout = apply.layout_of(self.target.strategy, comm)
        apply.apply(model, self.target.skeleton, layout, self.bindings, self.placed)

    def reducer(
        self, model: nn.Module, comm: Ranks, inner: GradientReducer | None
    ) -> GradientReducer:
        """Return a reducer that runs `inner`, then sums gradients of replicated parameters."""
        return ReplicaReducer(model.parameters(), comm, inner)


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""Matches a number between dots in a parameter name: the index in a list of modules."""


def _text_of(numbers: list[int]) -> str:
    """Return sorted numbers as ranges: `0-3,5` for 0, 1, 2, 3, 5."""
    runs = runs_of(numbers)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
