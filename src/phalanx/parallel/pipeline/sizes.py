"""Shapes and data types of the activations that stages send each other.

Both sides know the shape and the data type of each message, and it is contiguous on both: an
activation is announced by a header, and its gradient is like it. Where the shapes of a microbatch
decide the shapes of its activations, a header announces the first of them alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.comm.comm import Comm
from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.stage import Outline

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What activations may be of; a header has the number."""

HEADER_SIZE = 3 + 64
"""Numbers of a header: data type, length of an outline that follows, dimensions, and sizes, of
which torch computes on 64 at most."""

HEADER_BYTES = HEADER_SIZE * torch.int64.itemsize


class Sizes:
    """Shapes and data types of activations, which headers announce."""

    def __init__(self, comm: Comm, *, are_fixed: bool) -> None:
        """Announce each activation; if sizes `are_fixed`, the first of a microbatch's shapes."""
        self._comm = comm
        self._are_fixed = are_fixed
        self._known: dict[tuple[int, Any], tuple[torch.Size, torch.dtype]] = {}
        self._outlines: dict[int, Outline] = {}

    def announce(
        self, stage: int, microbatch: Any, tensor: Tensor, outline: Outline
    ) -> list[Tensor]:
        """Return what to send `stage` before an activation; nothing where it knows its sizes.

        The outline, `Stages.outline` with it, is sent if it is not the last one.

        Raises:
            StrategyError: the tensor is of a data type that stages do not send.
        """
        if tensor.dtype not in DTYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise StrategyError(
                f"pp: stage {stage} is to be sent a tensor of {tensor.dtype}; expected one of "
                f"{kinds}: choose another cut, or convert the tensor within a layer"
            )
        if self._are_fixed:
            key, found = _key(stage, microbatch), (tensor.shape, tensor.dtype)
            if key in self._known:
                assert found == self._known[key], "the shapes of a microbatch decide the sizes"
                return []
            self._known[key] = found
        is_new = self._outlines.get(stage, ()) != outline
        self._outlines[stage] = outline
        length = len(outline) if is_new else 0
        sizes = [DTYPES.index(tensor.dtype), length, tensor.ndim, *tensor.shape]
        parts = [sizes + [0] * (HEADER_SIZE - len(sizes)), *([outline] if is_new else [])]
        return [torch.tensor(part).to(self._comm.device) for part in parts]

    def expect(self, stage: int, microbatch: Any, source: int) -> tuple[Tensor, Outline]:
        """Return an empty tensor for what `stage` is to receive of the microbatch, and outline."""
        key = _key(stage, microbatch) if self._are_fixed else None
        if key is not None and key in self._known:
            shape, dtype = self._known[key]
            return torch.empty(shape, dtype=dtype, device=self._comm.device), ()
        kind, length, ndim, *sizes = self._receive(HEADER_SIZE, source)
        if length:
            self._outlines[stage] = self._receive(length, source)
        shape, dtype = torch.Size(sizes[:ndim]), DTYPES[kind]
        if key is not None:
            self._known[key] = shape, dtype
        buffer = torch.empty(shape, dtype=dtype, device=self._comm.device)
        return buffer, self._outlines.get(stage, ())

    def _receive(self, length: int, source: int) -> Outline:
        numbers = torch.empty(length, dtype=torch.int64, device=self._comm.device)
        return tuple(self._comm.recv_start(numbers, "pp", source).wait().tolist())


def _key(stage: int, microbatch: Any) -> tuple[int, Any]:
    """Return what the sizes of an activation depend on."""
    return stage, tuple(_shapes(microbatch))


def _shapes(value: Any) -> Iterator[torch.Size]:
    """Yield the shapes of the tensors in a value, in dataclasses too."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf.shape
        elif is_dataclass(leaf):
            yield from _shapes(vars(leaf))
