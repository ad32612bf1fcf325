"""The sharding of each parameter over the sub-axes of tp, for plans, checks and `apply`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from phalanx.errors import StrategyError
from phalanx.parallel.skeleton import Skeleton, Weight
from phalanx.parallel.tensor.layers import is_transposed
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.roles import PAGE, RECURSIVE_ROLES, RoleBinding
from phalanx.parallel.tensor.spec import Spec


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter and its sharding in a layout.

    `binding` is the binding of the first module that has the parameter; several may share it.
    """

    weight: Weight
    binding: RoleBinding
    layout: Layout

    @cached_property
    def spec(self) -> Spec:
        """Sub-axes of tp that split each dimension."""
        binding, layout, ndim = self.binding, self.layout, self.weight.ndim
        full: tuple[str, ...] = ()
        features = layout.residual.axes[2]
        matrix, vector = (full, full), full
        if binding.role in ("embedding", "head", "column", "lora_b"):
            # fsdp splits the rows of each shard again, and DTensor has no placement for fused
            # vectors that are split twice; so vectors of fused maps are replicated.
            matrix, vector = layout.column.axes, layout.inner.axes[2]
            vector = full if binding.is_fused else vector
        elif binding.role == "row":
            matrix, vector = layout.row.axes, features
        elif binding.role == "table":
            matrix = (full, features)
        elif binding.role == "norm":
            vector = features
        elif binding.role == "inner_norm":
            vector = layout.inner.axes[2]
        elif binding.role == "experts":
            owner, _, kind = self.weight.name.removesuffix(".weight").rpartition(".")
            if owner.endswith((".experts", ".shared")) and ndim > 1:
                matrix = layout.row.axes if kind == "down" else layout.column.axes
                return Spec.of(*[full] * (ndim - 2), *matrix)
        if ndim == 2:
            return Spec.of(*(reversed(matrix) if is_transposed(binding.module) else matrix))
        return Spec.of(*(vector, *[full] * ndim)[:ndim])

    def degrees(self, dim: int) -> list[int]:
        """Return the sizes of the sub-axes that split dimension `dim`, outer first."""
        return [self.layout.comm.size(axis) for axis in self.spec.axes[dim]]

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Sub-axes that replicate the parameter, over which its gradients have to be summed."""
        split = {axis for axes in self.spec.axes for axis in axes}
        axes = self.layout.axes
        return tuple(a for a in axes if a not in split and self.layout.comm.size(a) > 1)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard; the first rank has the largest one."""
        return self.spec.shard_shape(self.weight.shape, self.layout.comm)


def sharded_parameters(
    skeleton: Skeleton, bindings: Iterable[RoleBinding], layout: Layout
) -> list[ShardedParameter]:
    """Return the sharding of each parameter of a model; tied parameters have one entry.

    Raises:
        StrategyError: a parameter is in no module with a role, or in several modules whose roles
            split it differently.
    """
    weights = {name: weight for weight in skeleton.weights for name in weight.names}
    rows: dict[Weight, ShardedParameter] = {}
    for binding in bindings:
        for key, _ in binding.module.named_parameters(
            prefix=binding.name, recurse=binding.role in RECURSIVE_ROLES
        ):
            if (weight := weights.get(key)) is None:
                continue  # the parameter is in another pipeline stage
            row = ShardedParameter(weight, binding, layout)
            if rows.setdefault(weight, row).spec != row.spec:
                raise StrategyError(
                    f"tp: the parameter '{key}' is shared with a module that splits it "
                    "differently; give both modules roles that agree, as embedding and head do"
                )
    if (weight := next((w for w in skeleton.weights if w not in rows), None)) is not None:
        home = weight.name.rpartition(".")[0]
        raise StrategyError(
            f"tp: the parameter '{weight.name}' is in no module that has a role; give a pattern "
            f"for {f'{home!r}' if home else 'a module into which you move it'}, see {PAGE}"
        )
    return list(rows.values())
