"""Where each parameter of a model lies over the sub-axes of tp: the list that everything reads."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from phalanx.errors import StrategyError
from phalanx.parallel.tensor.layers import is_transposed
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.roles import OF_ALL, Site


@dataclass(frozen=True)
class Placed:
    """A parameter and its placements.

    Attributes:
        names: in the model; several if modules share it.
        parameter: itself.
        site: the module that holds it, the first of several, and its role.
        sizes: of each sub-axis of tp, outer first.
        placements: one a sub-axis.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    site: Site
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    placements: tuple[Placement, ...] = ()

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    def under(self, layout: Layout) -> Placed:
        """Return the same parameter under a layout."""
        placements = _placements(self.site, self.parameter, layout)
        return dataclasses.replace(self, sizes=layout.sizes, placements=placements)

    def axes(self, dim: int) -> tuple[str, ...]:
        """Return the sub-axes that split a dimension, outer first."""
        pairs = zip(self.sizes, self.placements, strict=True)
        return tuple(axis for axis, p in pairs if isinstance(p, Shard) and p.dim == dim)

    def degrees(self, dim: int) -> list[int]:
        """Return the sizes of the sub-axes that split a dimension, outer first."""
        return [self.sizes[axis] for axis in self.axes(dim)]

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The sub-axes over which ranks hold the same, and their gradients are to be summed."""
        pairs = zip(self.sizes, self.placements, strict=True)
        return tuple(axis for axis, p in pairs if p.is_replicate() and self.sizes[axis] > 1)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the first rank's shard, which no other rank's exceeds."""
        shape = list(self.parameter.shape)
        for dim in range(len(shape)):
            for size in self.degrees(dim):
                shape[dim] = -(-shape[dim] // size)
        return tuple(shape)


def placed(model: nn.Module, sites: Iterable[Site], layout: Layout) -> list[Placed]:
    """Return the parameters of a model, each once.

    Args:
        model: not split yet.
        sites: its modules with a role, which hold all its parameters.
        layout: how tp splits.

    Raises:
        StrategyError: a parameter belongs to modules whose roles split it differently.
    """
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    found: dict[nn.Parameter, Placed] = {}
    for site in sites:
        for key, parameter in site.module.named_parameters(recurse=site.role in OF_ALL):
            row = Placed(tuple(names[parameter]), parameter, site).under(layout)
            if found.setdefault(parameter, row).placements != row.placements:
                raise StrategyError(
                    f"tp: '{site.name}.{key}' is one parameter with another that is split "
                    "otherwise; give their modules roles that agree, as embedding and head do"
                )
    return list(found.values())


def _placements(site: Site, parameter: nn.Parameter, layout: Layout) -> tuple[Placement, ...]:
    """Return the placement of a parameter on each sub-axis of tp."""
    if site.role in ("embedding", "head", "column"):
        # fsdp splits the rows of each part again, which no DTensor can say of a fused vector.
        axis = layout.inner.features if site.parts == 1 else None
        matrix, vector = layout.placements(layout.column), axis
    elif site.role == "row":
        matrix, vector = layout.placements(layout.row), layout.residual.features
    elif site.role == "table":
        matrix, vector = layout.along(_axes(layout.residual.features), 1), None
    elif site.role == "norm":
        matrix, vector = layout.along(()), layout.residual.features
    else:
        matrix, vector = layout.along(()), None
    if parameter.ndim != 2:
        return layout.along(_axes(vector))
    return layout.transposed(matrix) if is_transposed(site.module) else matrix


def _axes(axis: str | None) -> tuple[str, ...]:
    return () if axis is None else (axis,)
