"""One recorder of a run on the meta device: operations, and storages from allocation to free.

On the meta device tensors have shapes and no numbers: nothing is computed, but every operator runs.
`count.py` records one block of a decoder, and `module.py` any module, link by link.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_GROUPED: Final[Any] = torch.ops.aten._grouped_mm

_FREE = ("empty", "new_empty", "empty_like", "_unsafe_view", "arange", "scalar_tensor")
"""Operators without a kernel, and small ones that a step runs once; none of these is counted."""


class Operation(NamedTuple):
    """One kernel call.

    Attributes:
        name: name of the operator.
        flops: FLOPs of a matrix product or of attention; 0 for other operators.
        num_bytes: bytes read and written.
        product: rows, columns and inner size of a matrix product; zeros for other operators. Of a
            grouped product, of each of its products with as many rows as the mean, rounded up.
        scores: attention scores, all queries x all keys, masked pairs included; 0 for others.
        reads_only_weights: whether it reads only weights or their gradients.
        groups: number of products of a grouped product, one for each expert.
    """

    name: str
    flops: int
    num_bytes: int
    product: tuple[int, int, int] = (0, 0, 0)
    scores: int = 0
    reads_only_weights: bool = False
    groups: int = 1


class MetaRecorder(TorchDispatchMode):
    """A dispatch mode that records operations, and allocations and frees of storages, by part.

    A part of the run begins with the first operator after `enter`; before it, functions of the
    part before return, and free their tensors:

        enter("block")              enter("head")
              | mm  add  mm  return       | norm  mm
        ------[ block ------------------- [ head ----     events: +x +y -x | +z ...

    Attributes:
        operations: part -> its operations, in order.
        begins: part -> number of events before it.
        part: the part entered last.
        events: (storage number, bytes allocated, negative when they are freed), in order.
    """

    def __init__(self, adjust: Callable[[Operation, Any, Any], Operation] | None = None) -> None:
        """Create a recorder.

        Args:
            adjust: function of an operation, its arguments and its results that returns the
                operation to record.
        """
        super().__init__()
        self.operations: dict[Hashable, list[Operation]] = defaultdict(list)
        self.begins: dict[Hashable, int] = {}
        self.part: Any = None
        self.events: list[tuple[int, int]] = []
        self._adjust = adjust
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._numbers = itertools.count()

    def enter(self, part: Hashable, *_: Any) -> None:
        """Begin `part` with the next operator; also as a hook of a tensor or a module."""
        self.part = part

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.begins.setdefault(self.part, len(self.events))
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.phalanx_tensor.ring_attention:
            # Running it would loop over all blocks of all ring ranks, and save the same tensors.
            q_BTHK: Tensor = args[0]
            wide = torch.promote_types(q_BTHK.dtype, torch.float32)
            sizes = q_BTHK.shape
            out: Any = (q_BTHK.new_empty(sizes), q_BTHK.new_empty(sizes[:3], dtype=wide))
        elif func.overloadpacket is _GROUPED:
            # The operator takes only bfloat16 on the meta device.
            x, y, ends = args[:3]
            groups = ends.shape if y.ndim == 2 else ()  # of a weight's gradient
            out = x.new_empty(*groups, x.shape[0], y.shape[-1])
        else:
            out = func(*args, **kwargs)
        read = {storage_id(x) for x in tensors_in(args, kwargs)}
        for x in tensors_in(out):
            if x.ndim and storage_id(x) not in read:
                self._add(x.untyped_storage())
        if (operation := operation_of(func, args, kwargs, out)) is not None:
            if self._adjust is not None:
                operation = self._adjust(operation, (args, kwargs), out)
            self.operations[self.part].append(operation)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = cast(Any, storage)._cdata
        if key in self._live:
            return
        # A weak reference sees the end of a storage, whoever held it last: autograd, a hook or the
        # loop.
        number, num_bytes = next(self._numbers), storage.nbytes()

        def free(_: Any) -> None:
            del self._live[key]
            self.events.append((number, -num_bytes))

        self._live[key] = weakref.ref(storage, free), number
        self.events.append((number, num_bytes))

    def levels(self, kept: Sequence[Tensor] = ()) -> list[int]:
        """Return the bytes alive before the first event and after each, `kept` excluded."""
        numbers = {self._live[k][1] for k in map(storage_id, kept) if k in self._live}
        sizes = (0 if number in numbers else size for number, size in self.events)
        return list(itertools.accumulate(sizes, initial=0))


def operation_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Operation | None:
    """Return the operation of an operator that has run; None if no kernel needs to be counted."""
    packet = func.overloadpacket
    read = {name: value for name, value in kwargs.items() if name != "out"}
    inputs, outputs = [*tensors_in(args, read)], [*tensors_in(out)]
    name = str(packet).split(".", 1)[-1]
    known = {storage_id(x) for x in inputs}
    is_view = not func._schema.is_mutable and all(storage_id(x) in known for x in outputs)
    if name in _FREE or is_view or not any(x.ndim for x in outputs):
        return None
    num_bytes, product = sum(map(_nbytes, (*inputs, *outputs))), (0, 0, 0)
    flops = scores = 0
    groups = 1
    if "embedding" in name or "index_add" in name:  # reads and writes only the selected rows
        num_bytes = 2 * min(map(_nbytes, (x for x in (*inputs, *outputs) if x.ndim > 1)))
    elif name.startswith("_scaled_dot_product"):
        is_backward = "backward" in name
        q, k = inputs[1:3] if is_backward else inputs[:2]
        scores = q.shape[:-1].numel() * k.shape[-2]
        # Two products, backward five. torch has no formula for the operators of a CPU.
        flops = (10 if is_backward else 4) * scores * q.shape[-1]
    elif packet is _GROUPED:
        # Rows M of all experts are the rows of x, or the inner size in a weight's gradient:
        #
        #     [M, I] x [E, I, O] -> [M, O]         [I, M] x [M, O] -> [E, I, O]
        (rows, inner), columns, groups = inputs[0].shape, inputs[1].shape[-1], inputs[2].numel()
        flops = 2 * rows * columns * inner
        each = -(-(rows if inputs[1].ndim == 3 else inner) // groups)
        product = (each, columns, inner) if inputs[1].ndim == 3 else (rows, columns, each)
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        if "attention" in name:
            scores = inputs[0].shape[:-1].numel() * inputs[1].shape[-2]
        elif flops:
            inner = inputs[0].shape[-1]
            rows = max(x.shape[:-1].numel() for x in (inputs[0], outputs[0]))
            product = rows, max(1, flops // (2 * rows * inner)), inner
    return Operation(name, flops, num_bytes, product, scores, groups=groups)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments or results, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*cast(Sequence[Any], value))
        elif isinstance(value, dict):
            yield from tensors_in(*cast(dict[str, Any], value).values())


def storage_id(x: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return cast(Any, x.untyped_storage())._cdata
