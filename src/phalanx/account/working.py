"""What passes while a rank works: the most bytes at the head, and in the backward of a block.

`count` says what stays until backward has read it. Beside that there are results that pass: logits
and their gradients, and in a block the gradients between its operators. They are seen as `count`
sees: one block runs forward and backward on the meta device.

                    level              most of the head         most of a block's backward
    embedding -> [block] -> norm, loss ... loss's backward -> [backward of the block] -> ...

Both are counted from the level at which the norm begins. Gradients of parameters do not count:
they stay.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.account.count import Case, Kernels, batch_of, decoder_of, labels_of, split, storage_id
from phalanx.models import kernels
from phalanx.models.decoder import Block


class Working(NamedTuple):
    """Most bytes beyond what blocks keep, the residual included: see above."""

    head: int
    block: int


@dataclass(eq=False)
class _Storage:
    """A storage from when it is made until it is freed."""

    num_bytes: int


class Spans(TorchDispatchMode):
    """Notes when storages are made and freed, and where parts of the run begin."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[_Storage, int]] = []
        self.marks: dict[str, int] = {}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Storage]] = {}

    def mark(self, name: str, *_: Any) -> None:
        """Note where a part begins."""
        self.marks[name] = len(self.events)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.phalanx_tensor.ring_attention:  # as in `count`
            q: Tensor = args[0]
            wide = torch.promote_types(q.dtype, torch.float32)
            out: Any = (q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide))
        else:
            out = func(*args, **kwargs)
        given = {storage_id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.ndim and storage_id(x) not in given:
                self._add(x.untyped_storage())
        self.see(func, args, kwargs, out)
        return out

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Be shown an operator that has run."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = cast(Any, storage)._cdata
        if key in self._live:
            return
        span = _Storage(storage.nbytes())

        def free(_: Any) -> None:
            del self._live[key]
            self.events.append((span, -1))

        self._live[key] = weakref.ref(storage, free), span
        self.events.append((span, 1))

    def levels(self, kept: list[Tensor]) -> list[int]:
        """Return the bytes alive before the first event and after each, without `kept`."""
        spans = {id(self._live[k][1]) for k in map(storage_id, kept) if k in self._live}
        sizes = (0 if id(span) in spans else sign * span.num_bytes for span, sign in self.events)
        return list(itertools.accumulate(sizes, initial=0))


@functools.lru_cache(maxsize=1 << 10)
def working(case: Case) -> Working:
    """Count a case by running it on the meta device; each case runs once.

    Raises:
        StrategyError: the strategy does not split such a decoder.
    """
    model, spans = decoder_of(case), Spans()
    kernel_mode, (block, *_) = Kernels(case.device), model.blocks
    block.forward = MethodType(functools.partial(_marked, spans, kernel_mode), block)
    split(case, model)
    stream = 0

    def enter_head(_module: Any, args: tuple[Tensor, ...]) -> None:
        nonlocal stream
        stream = args[0].untyped_storage().nbytes()
        spans.mark("head")
        args[0].register_hook(functools.partial(spans.mark, "backward"))

    model.norm.register_forward_pre_hook(enter_head)
    with kernels.assumed(case.device, in_chunks=True), kernel_mode, spans:
        batch = batch_of(case)
        loss = model(labels_BT=labels_of(case), **batch)
        loss.backward()
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    levels = spans.levels(gradients)
    head, backward = spans.marks["head"], spans.marks["backward"]
    end = spans.marks.get("end", len(levels) - 1)
    floor = levels[head] - stream
    return Working(
        head=max(levels[head : backward + 1]) - floor,
        block=max(levels[backward : end + 1]) - floor,
    )


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _marked(spans: Spans, kernel_mode: Kernels, block: Block, x: Tensor, *args: Any) -> Tensor:
    """Run a block's own forward, and note where its backward ends."""
    if x.requires_grad and "head" not in spans.marks:
        x.register_hook(functools.partial(spans.mark, "end"))
    with kernel_mode:  # backward runs without the modes around it
        return Block.forward(block, x, *args)
