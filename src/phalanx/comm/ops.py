"""Dispatcher ops through which an engine other than a process group starts its collectives.

So a dispatch mode sees each collective as one call (comm.calls). The ops of all-gather and
reduce-scatter are in comm.exchange, because gloo groups use them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.comm.heap import own_heap
from phalanx.comm.transfer import ENGINES, LIBRARY, register

IN_PLACE: Final = {
    "all_reduce": "str reduce_op",
    "broadcast": "int root_rank",
    "reduce": "int root_rank",
    "barrier": "int option",
    "send": "int dst, int tag",
    "recv": "int src, int tag",
}
"""Collective of one tensor -> op arguments after the tensor, the group name and the engine."""

OUT_OF_PLACE: Final = ("all_to_all", "swap")
"""Collectives from an input to an output tensor, in addition to the ones in comm.exchange."""

COLLECTIVES: Final[Any] = torch.ops.phalanx_comm
"""Name of a collective, as an attribute -> its op, which returns the number of a transfer."""


def _in_place(op: str) -> Callable[..., int]:
    def run(tensor: Tensor, group_name: str, engine: int, option: Any, *_: Any) -> int:
        del group_name
        return register(ENGINES[engine].run(op, tensor, tensor, option))

    return run


def _between(op: str) -> Callable[..., int]:
    def run(
        output: Tensor, given: Tensor, group_name: str, engine: int, option: int, is_spent: bool,
        *_: Any,
    ) -> int:  # fmt: skip
        del group_name
        return register(ENGINES[engine].run(op, output, given, option, is_spent))

    return run


for _op, _arguments in IN_PLACE.items():
    LIBRARY.define(f"{_op}(Tensor(a!) tensor, str group_name, int engine, {_arguments}) -> int")
    LIBRARY.impl(_op, _in_place(_op), "CPU")
for _op in OUT_OF_PLACE:
    LIBRARY.define(
        f"{_op}(Tensor(a!) output, Tensor input, str group_name, int engine, "
        "int option, bool is_spent, int[] output_split_sizes, int[] input_split_sizes) -> int"
    )
    LIBRARY.impl(_op, _between(_op), "CPU")


def _allocate(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return own_heap().empty(size, dtype)


def _gather_output(size: Sequence[int], dtype: torch.dtype, engine: int) -> Tensor:
    return ENGINES[engine].allocate_gather_output(size, dtype)


HEAP: Final = torch.library.Library("shared_memory", "FRAGMENT")
"""Library of the op that allocates on the heap, so that memory accounting sees the tensors."""

HEAP.define("allocate(SymInt[] size, *, ScalarType dtype) -> Tensor")
HEAP.impl("allocate", _allocate, "CompositeExplicitAutograd")
HEAP.define("gather_output(SymInt[] size, *, ScalarType dtype, int engine) -> Tensor")
HEAP.impl("gather_output", _gather_output, "CompositeExplicitAutograd")
