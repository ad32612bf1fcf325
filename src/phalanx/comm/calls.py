"""Read a collective from the dispatcher: which it is, on which group, with which tensors.

Every collective of torch.distributed passes the dispatcher as an op of the namespaces `c10d` or
`_c10d_functional`, and every exchange of comm.exchange as one of `phalanx_comm`. A dispatch mode
that hands each op to `read_call` so sees our own calls and the calls of FSDP2,
DistributedDataParallel, DTensor and the pipeline runtime alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

_NAMESPACES = ("c10d", "_c10d_functional", "phalanx_comm")

_OPS = {
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced "
    "all_reduce_coalesced_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_ all_gather_into_tensor all_gather_into_tensor_out "
    "all_gather_into_tensor_coalesced all_gather",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced "
    "reduce_scatter",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single all_to_all swap",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_ reduce",
    "gather": "gather_",
    "scatter": "scatter_",
    "barrier": "barrier monitored_barrier_",
    "send": "send isend",
    "recv": "irecv recv_ recv",
    "recv_any_source": "recv_any_source_",
}
"""Name of a collective -> its ops of the dispatcher."""

_KIND = {op: name for name, ops in _OPS.items() for op in ops.split()}

_NO_COLLECTIVE = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
"""Ops of the namespaces above that do not speak to other ranks."""


@dataclass(frozen=True)
class Call:
    """One call of a collective.

    Attributes:
        op: name of the collective.
        group: whom it is among.
        arguments: what the op of the dispatcher was given, by the names of its schema.
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
        """The tensors that go in, in lists of lists where the op has them so."""
        return self._tensors("input") or self._tensors("tensor")

    @property
    def outputs(self) -> list[Any]:
        """The tensors that come out where they are not the inputs; empty if the op makes them."""
        return self._tensors("out")

    def _tensors(self, prefix: str) -> list[Any]:
        for name, value in self.arguments.items():
            if name.startswith(prefix) and not name.endswith("_split_sizes"):
                return [value] if isinstance(value, torch.Tensor) else list(value)
        return []


def read_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Return the collective that an op of the dispatcher is; None for any other op.

    Raises:
        NotImplementedError: the op is of torch.distributed, but not known here.
    """
    if getattr(func, "namespace", "") not in _NAMESPACES:
        return None
    name = func._schema.name.split("::")[1]
    if name in _NO_COLLECTIVE:
        return None
    if name not in _KIND:
        raise NotImplementedError(f"the collective {func} is not known to phalanx.comm.calls")
    names = (argument.name for argument in func._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return Call(_KIND[name], _group(func, arguments), arguments)


def group_named(name: Any) -> dist.ProcessGroup:
    """Return the group that the operators of torch and of comm.exchange call by `name`."""
    # Private, and the only way from a name to its group; tests/comm/test_ledger.py pins it.
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateUsage]


@lru_cache(maxsize=64)
def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group; not anew at each call, since they may be thousands."""
    return tuple(dist.get_process_group_ranks(group))


def _group(func: Any, arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the group an op was called on."""
    if "group_name" in arguments:
        return group_named(arguments["group_name"])
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    raise NotImplementedError(f"phalanx.comm.calls finds no group among the arguments of {func}")
