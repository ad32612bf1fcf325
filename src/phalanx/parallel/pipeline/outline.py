"""Forms of layer outputs, encoded as integers that one stage sends to the next.

For each layer: 1 for a tuple or else 0, the number of parts, and for each part its dtype, number of
dimensions and sizes; a part that is None has the dtype -1. An unknown form has no parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.parallel.pipeline.stage import Outline

_KINDS = tuple(each for each in vars(torch).values() if isinstance(each, torch.dtype))
"""All dtypes of torch, in an order that is equal on all ranks; an outline has the index."""

_NONE = -1


class Like(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: torch.Size


class Form(NamedTuple):
    """Form of a layer's output: one tensor, or a tuple of tensors and None."""

    is_tuple: bool
    parts: tuple[Like | None, ...]


def form_of(output: Any) -> Form | None:
    """Return the form of an output; None if it contains values other than tensors and None."""
    is_tuple = type(output) in (tuple, list)
    parts = cast("Iterable[Any]", output if is_tuple else [output])
    likes = [Like(p.dtype, p.shape) if isinstance(p, Tensor) else p for p in parts]
    is_known = all(part is None or isinstance(part, Like) for part in likes)
    return Form(is_tuple, tuple(likes)) if is_known else None


def write(names: Iterable[str], forms: Mapping[str, Form]) -> Outline:
    """Encode the forms of the layers `names` as an outline."""
    numbers: list[int] = []
    for name in names:
        # A tuple (float32 [2, 8], None):  1  2  | dtype  2  2  8 |  -1  0
        is_tuple, parts = forms.get(name, Form(False, ()))
        numbers += [is_tuple, len(parts)]
        for part in parts:
            kind, shape = (_NONE, ()) if part is None else (_KINDS.index(part.dtype), part.shape)
            numbers += [kind, len(shape), *shape]
    return tuple(numbers)


def read(names: Iterable[str], outline: Outline) -> dict[str, Form]:
    """Decode the outline of the layers `names`; layers of unknown form are left out."""
    numbers, forms = iter(outline), dict[str, Form]()
    for name in names:
        is_tuple, count = next(numbers, 0), next(numbers, 0)
        parts: list[Like | None] = []
        for _ in range(count):
            kind, ndim = next(numbers), next(numbers)
            shape = torch.Size(itertools.islice(numbers, ndim))
            parts.append(None if kind == _NONE else Like(_KINDS[kind], shape))
        if parts or is_tuple:
            forms[name] = Form(bool(is_tuple), tuple(parts))
    return forms
