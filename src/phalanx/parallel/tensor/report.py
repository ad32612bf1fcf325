"""What tensor parallelism does to each parameter, said without starting a process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from phalanx.parallel.split import Row
from phalanx.parallel.tensor.placed import Placed


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
