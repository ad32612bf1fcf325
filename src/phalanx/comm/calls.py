"""Recognize collectives among dispatcher ops: their kind, group and tensors.

Every collective of torch.distributed passes the dispatcher as an op of the namespaces `c10d` or
`_c10d_functional`. So `comm.watch` sees the collectives of FSDP2, DistributedDataParallel, DTensor
and the pipeline runtime by `read_call`; our own engines report theirs by `watch.call`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

NAMESPACES = ("c10d", "_c10d_functional")

_OPS = {
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced "
    "all_reduce_coalesced_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_ all_gather_into_tensor all_gather_into_tensor_out "
    "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_ reduce",
    "gather": "gather_",
    "scatter": "scatter_",
    "barrier": "barrier monitored_barrier_",
    "send": "send isend",
    "recv": "irecv recv_ recv",
    "recv_any_source": "recv_any_source_",
}
"""Name of a collective -> its dispatcher ops."""

KINDS = {op: name for name, ops in _OPS.items() for op in ops.split()}

_NO_COLLECTIVE = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
"""Ops of the namespaces above that do not communicate."""


@dataclass(frozen=True)
class Call:
    """One call of a collective.

    Attributes:
        op: name of the collective.
        group: process group.
        arguments: argument name, as in the dispatcher op's schema -> value.
    """

    op: str
    group: dist.ProcessGroup
    arguments: Mapping[str, Any]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return _ranks_of(self.group)

    @property
    def inputs(self) -> list[Any]:
        """The input tensors, in nested lists if the op has nested lists."""
        return self._tensors("input") or self._tensors("tensor")

    @property
    def outputs(self) -> list[Any]:
        """The output tensors among the arguments; empty if in place or allocated by the op."""
        return self._tensors("out")

    def _tensors(self, prefix: str) -> list[Any]:
        for name, value in self.arguments.items():
            if name.startswith(prefix) and not name.endswith("_split_sizes"):
                return [value] if isinstance(value, torch.Tensor) else list(value)
        return []


def read_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Return the collective call that a dispatcher op makes; None if the op is no collective.

    Raises:
        NotImplementedError: the op is in a namespace of collectives, but not in the table above.
    """
    if getattr(func, "namespace", "") not in NAMESPACES:
        return None
    name = func._schema.name.split("::")[1]
    if name in _NO_COLLECTIVE:
        return None
    if name not in KINDS:
        raise NotImplementedError(f"the collective {func} is not known to phalanx.comm.calls")
    names = (argument.name for argument in func._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return Call(KINDS[name], _group(func, arguments), arguments)


def group_named(name: Any) -> dist.ProcessGroup:
    """Return the process group that ops of torch identify by `name`."""
    # Private, and the only way from a name to its group; tests/comm/test_ledger.py pins it.
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateUsage]


@lru_cache(maxsize=64)
def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group, cached because there may be thousands."""
    return tuple(dist.get_process_group_ranks(group))


def _group(func: Any, arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group on which an op was called."""
    if "group_name" in arguments:
        return group_named(arguments["group_name"])
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    raise NotImplementedError(f"phalanx.comm.calls finds no group among the arguments of {func}")
