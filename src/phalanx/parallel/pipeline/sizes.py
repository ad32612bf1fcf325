"""Shapes and dtypes of the activations that stages send to each other.

Sender and receiver must agree on the shape and dtype of each message, which is contiguous. A header
announces an activation; its gradient has the same shape and dtype. If the shapes of a microbatch
determine the shapes of its activations, a header is sent only for the first such microbatch.
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
"""Dtypes of activations that can be sent; a header has the index."""

HEADER_SIZE = 3 + 64
"""Integers in a header: dtype, length of the outline that follows, number of dimensions, and up to
64 sizes, the most dimensions that torch computes on."""

HEADER_BYTES = HEADER_SIZE * torch.int64.itemsize


class Sizes:
    """Makes and receives headers, and stores the shapes, dtypes and outlines that they announce."""

    def __init__(self, comm: Comm, *, are_fixed: bool) -> None:
        """Announce each activation; if `are_fixed`, only the first for each microbatch shape."""
        self._comm = comm
        self._are_fixed = are_fixed
        self._known: dict[tuple[int, Any], tuple[torch.Size, torch.dtype]] = {}
        self._outlines: dict[int, Outline] = {}

    def announce(
        self, stage: int, microbatch: Any, tensor: Tensor, outline: Outline
    ) -> list[Tensor]:
        """Return the header, and perhaps the outline, to send to `stage` before an activation.

        Nothing is sent if `stage` already has the sizes. `outline` (`Stages.outline`) is sent only
        if it differs from the last one.

        Raises:
            StrategyError: stages cannot send the dtype of the tensor.
        """
        if tensor.dtype not in DTYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise StrategyError(
                f"pp: the tensor to send to stage {stage} is of {tensor.dtype}; expected one of "
                f"{kinds}: choose another cut, or convert the tensor within a layer"
            )
        if self._are_fixed:
            key, size = _key(stage, microbatch), (tensor.shape, tensor.dtype)
            if key in self._known:
                assert size == self._known[key], "the shapes of a microbatch decide the sizes"
                return []
            self._known[key] = size
        is_new = self._outlines.get(stage, ()) != outline
        self._outlines[stage] = outline
        length = len(outline) if is_new else 0
        # header     | dtype | length of the outline | ndim | sizes ... | 0 ... |    HEADER_SIZE
        # integers then       | outline |      only if it is new
        sizes = [DTYPES.index(tensor.dtype), length, tensor.ndim, *tensor.shape]
        parts = [sizes + [0] * (HEADER_SIZE - len(sizes)), *([outline] if is_new else [])]
        return [torch.tensor(part).to(self._comm.device) for part in parts]

    def expect(self, stage: int, microbatch: Any, source: int) -> tuple[Tensor, Outline]:
        """Return an empty buffer for an activation, and its outline; receive a header if needed."""
        key = _key(stage, microbatch) if self._are_fixed else None
        # Both ends decide alike whether there is a header, from the shapes of the microbatch, which
        # the ranks of a pipeline all have: so none waits for a header that is not sent.
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
    """Return the key of fixed sizes: the stage, and the shapes of a microbatch."""
    return stage, tuple(_shapes(microbatch))


def _shapes(value: Any) -> Iterator[torch.Size]:
    """Yield the shapes of all tensors in a value, including fields of dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf.shape
        elif is_dataclass(leaf):
            yield from _shapes(vars(leaf))
