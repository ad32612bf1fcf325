"""What tensor parallelism does to each parameter, said without starting a process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from phalanx.parallel.skeleton import Skeleton
from phalanx.parallel.split import Row
from phalanx.parallel.tensor.placed import Placed


def report(skeleton: Skeleton, parameters: Iterable[Placed]) -> list[Row]:
    """Return what tp does to each parameter, in their order.

    Those that differ only in the number of the block, the first number of the name, are one row.
    """
    numbers: dict[Row, list[int]] = {}
    for placed in parameters:
        weight = placed.weight
        found = (_NUMBER.search(name) for name in skeleton.named(weight.name))
        row = Row(
            name=_NUMBER.sub("*", weight.name, count=1),
            role=placed.binding.text,
            full=weight.shape,
            shard=placed.shard_shape,
            axes=placed.spec.axes,
            tied=weight.names[1:],
        )
        numbers.setdefault(row, []).extend(int(number[0]) for number in found if number)
    return [
        dataclasses.replace(row, name=row.name.replace("*", _ranges(found), 1))
        for row, found in numbers.items()
    ]


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""A name between dots that is a number: of an element of a list of modules."""


def _ranges(numbers: list[int]) -> str:
    """Return `0-3,5` of 0, 1, 2, 3, 5."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
