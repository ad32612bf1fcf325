"""A count of the bytes of tensors that live while a model runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make while it is on, until they are freed.

    Attributes:
        now: bytes alive.
        peak: most bytes alive at a time.
        held: most bytes alive when the gradient came to a block whose tensors are all there, kept
            or made again: what is held for backward, without the buffers of backward itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.held = 0
        self.is_backward = False
        self.is_in_block = False
        self.has_run_again = True
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.is_backward and self.has_run_again and not self.is_in_block:
            self.held = max(self.held, self.now)
        self.has_run_again = self.is_in_block
        inputs = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id_of(x) not in inputs:
                self.add(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self.known or num_bytes == 0:
            return

        def free(_: Any) -> None:
            del self.known[key]
            self.now -= num_bytes

        self.known[key] = weakref.ref(storage, free)
        self.now += num_bytes


def id_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata
