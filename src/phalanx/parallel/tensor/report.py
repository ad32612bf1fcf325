"""What tensor parallelism does to each parameter, said without starting a process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.parallel.tensor.placed import Placed


@dataclass(frozen=True)
class Row:
    """What happens to a parameter, or to those of several blocks that fare alike.

    Attributes:
        name: as in `blocks.0-11.mlp.up.weight`.
        role: of the module that holds it, as a pattern says it.
        full, shard: its shape, and that of the first rank's shard.
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


def report(parameters: Iterable[Placed]) -> list[Row]:
    """Return what tp does to each parameter, in their order."""
    return _folded(
        Row(
            name=row.name,
            role=row.binding.text,
            full=tuple(row.parameter.shape),
            shard=row.shard_shape,
            axes=row.spec.axes,
            tied=row.names[1:],
        )
        for row in parameters
    )


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""A name between dots that is a number: of an element of a list of modules."""


def _folded(rows: Iterable[Row]) -> list[Row]:
    """Fold rows that differ only in the number of the block, the first number of the name."""
    numbers: dict[Row, list[int]] = {}
    for row in rows:
        number = _NUMBER.search(row.name)
        alike = dataclasses.replace(row, name=_NUMBER.sub("*", row.name, count=1))
        numbers.setdefault(alike, []).extend([] if number is None else [int(number[0])])
    return [
        dataclasses.replace(row, name=row.name.replace("*", _ranges(found), 1))
        for row, found in numbers.items()
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
