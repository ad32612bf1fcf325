"""The forms of what the layers of a chain give, as numbers that one stage sends the next.

Of each layer: 1 if it gives a tuple and 0 if not, how many parts, and of each part its data type,
dimensions and sizes; None has the data type -1. An unknown form has no parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.parallel.pipeline.stage import Outline

_KINDS = tuple(each for each in vars(torch).values() if isinstance(each, torch.dtype))
"""Data types that an outline has the number of: all of torch, the same on all ranks."""

_NONE = -1


class Like(NamedTuple):
    """The data type and the shape of a tensor."""

    dtype: torch.dtype
    shape: torch.Size


class Form(NamedTuple):
    """What a layer gives: a tensor, or several in a tuple, of which some may be None."""

    is_tuple: bool
    parts: tuple[Like | None, ...]


def form_of(output: Any) -> Form | None:
    """Return the form of an output; None if it has other values than tensors and None."""
    is_tuple = type(output) in (tuple, list)
    parts = cast("Iterable[Any]", output if is_tuple else [output])
    found = [Like(p.dtype, p.shape) if isinstance(p, Tensor) else p for p in parts]
    is_known = all(part is None or isinstance(part, Like) for part in found)
    return Form(is_tuple, tuple(found)) if is_known else None


def write(names: Iterable[str], forms: Mapping[str, Form]) -> Outline:
    """Return the numbers of what layers give."""
    numbers: list[int] = []
    for name in names:
        is_tuple, parts = forms.get(name, Form(False, ()))
        numbers += [is_tuple, len(parts)]
        for part in parts:
            kind, shape = (_NONE, ()) if part is None else (_KINDS.index(part.dtype), part.shape)
            numbers += [kind, len(shape), *shape]
    return tuple(numbers)


def read(names: Iterable[str], outline: Outline) -> dict[str, Form]:
    """Return what layers give, as far as it is known."""
    numbers, found = iter(outline), dict[str, Form]()
    for name in names:
        is_tuple, count = next(numbers, 0), next(numbers, 0)
        parts = [_read_part(numbers) for _ in range(count)]
        if parts or is_tuple:
            found[name] = Form(bool(is_tuple), tuple(parts))
    return found


def _read_part(numbers: Iterator[int]) -> Like | None:
    kind, ndim = next(numbers), next(numbers)
    shape = torch.Size(itertools.islice(numbers, ndim))
    return None if kind == _NONE else Like(_KINDS[kind], shape)
