"""What tensor parallelism does to each parameter, said without starting a process."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Shard

from phalanx.parallel.tensor.apply import layout_of, part_shape, placements_of
from phalanx.parallel.tensor.roles import Patterns, sites_of
from phalanx.strategy import Strategy


@dataclass(frozen=True)
class Row:
    """What happens to a parameter, or to those of several blocks that fare alike.

    Attributes:
        name: as in `blocks.0-11.mlp.up.weight`.
        role: of the module that holds it, as a pattern says it.
        whole: its shape.
        part: the shape of what the first rank holds.
        axes: of each dimension, the sub-axes of tp that split it, outer first.
        tied: other names of the same parameter.
    """

    name: str
    role: str
    whole: tuple[int, ...]
    part: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    tied: tuple[str, ...] = ()

    @property
    def notation(self) -> str:
        """Its shape with the axes that split it, as in `[128_tp_col, 64_tp_row]`."""
        sizes = zip(self.whole, self.axes, strict=True)
        return f"[{', '.join('_'.join((str(size), *axes)) for size, axes in sizes)}]"


def report(model: nn.Module, strategy: Strategy, patterns: Patterns | None = None) -> list[Row]:
    """Return what `apply` does to each parameter, in the order of the model.

    Args:
        model: not split yet, on any device, meta too.
        strategy: its tp is above 1.
        patterns: names of modules to roles, see `sites_of`.

    Raises:
        StrategyError: see `sites_of`.
    """
    layout = layout_of(strategy)
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    rows: dict[nn.Parameter, Row] = {}
    for site in sites_of(model, patterns):
        for name, placements in placements_of(site, layout).items():
            parameter = site.module.get_parameter(name)
            pairs = list(zip(layout.sizes, placements, strict=True))
            axes = tuple(
                tuple(axis for axis, placement in pairs if placement == Shard(dim))
                for dim in range(parameter.ndim)
            )
            role = site.role if site.parts == 1 else f"{site.role}/{site.parts}"
            part = part_shape(parameter.shape, layout, placements)
            first, *tied = names[parameter]
            row = Row(first, role, tuple(parameter.shape), part, axes, tuple(tied))
            rows.setdefault(parameter, row)
    return _folded(rows[parameter] for parameter in model.parameters())


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""A name between dots that is a number: of an element of a list of modules."""


def _folded(rows: Iterable[Row]) -> list[Row]:
    """Fold rows that differ only in the number of the block, the first number of the name."""
    numbers: dict[Row, list[int]] = {}
    for row in rows:
        number = _NUMBER.search(row.name)
        name = row.name if number is None else _NUMBER.sub("*", row.name, count=1)
        alike = Row(name, row.role, row.whole, row.part, row.axes, row.tied)
        numbers.setdefault(alike, []).extend([] if number is None else [int(number[0])])
    return [
        Row(r.name.replace("*", _ranges(found), 1), r.role, r.whole, r.part, r.axes, r.tied)
        for r, found in numbers.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """Return `0-3,5` of 0, 1, 2, 3, 5."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
