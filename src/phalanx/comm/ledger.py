"""Count every collective: its op, bytes, mesh axis and phase, whoever called it.

A `Ledger` is a dispatch mode. Every collective of torch.distributed passes the dispatcher as an op
of the namespaces `c10d` or `_c10d_functional`, and those of comm.exchange as one of `phalanx`, so
one place sees our own calls and those of FSDP2, DistributedDataParallel, DTensor and the pipeline
runtime alike. The mode costs a few microseconds for each tensor operation; use it for the steps
that are counted, not for all.

`payload_bytes` is the size of the whole tensor of the collective (the gathered, reduced or
broadcast one); `sent_bytes` is what one rank must send under a bandwidth-optimal algorithm over N
ranks (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009):

    all_reduce                                                        2 (N-1)/N
    all_gather, reduce_scatter, all_to_all, broadcast, reduce, ...      (N-1)/N
    send                                                              1
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Phase = Callable[[str], AbstractContextManager[None]]
"""`with phase("backward"):` books what runs inside under that name."""


def no_phase(name: str) -> AbstractContextManager[None]:
    """Book nothing: the phase of a step that nobody watches."""
    del name
    return nullcontext()


_KIND = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
}
"""Op of the dispatcher -> its name here."""

_WITHOUT_PAYLOAD = {
    "barrier", "recv_", "recv_any_source_", "monitored_barrier_", "wait_tensor",
    "_wrap_tensor_autograd",
}  # fmt: skip
"""Ops that move no payload of their own: a receive is counted where it is sent."""


@dataclass(frozen=True)
class Entry:
    """One collective, or several that are alike added up.

    Attributes:
        phase: what the step was doing, such as "forward", "backward" or "clip".
        axis: name of the mesh axis, several joined by "_", or "world".
        op: name of the collective.
        calls: how many.
        payload_bytes: bytes of the whole tensors.
        sent_bytes: bytes that one rank must send, on average over the axis.
    """

    phase: str
    axis: str
    op: str
    calls: int
    payload_bytes: int
    sent_bytes: float


def sent_bytes(op: str, payload_bytes: float, num_ranks: int) -> float:
    """Return the bytes that one of `num_ranks` must send for `op` under an optimal algorithm."""
    if op == "send":
        return payload_bytes
    return payload_bytes * (2 if op == "all_reduce" else 1) * (num_ranks - 1) / num_ranks


class Ledger(TorchDispatchMode):
    """Counts the collectives that run inside `with Ledger(mesh) as ledger:`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._axis_of = _axes_by_ranks(mesh)
        self._phase = "other"
        self._sums: dict[tuple[str, str, str], tuple[int, int, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Book what runs inside under `name`."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def entries(self) -> list[Entry]:
        """Return what was counted, alike collectives added up, in the order first seen."""
        return [Entry(*key, *sums) for key, sums in self._sums.items()]

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs its own collectives, which come back here
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "phalanx"):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.split("::")[1]
        if name in _WITHOUT_PAYLOAD:
            return
        if name not in _KIND:
            raise NotImplementedError(f"the ledger does not know the collective {func}")
        op = _KIND[name]
        ranks = _group_ranks(func, args)
        payload = _payload_bytes(op, args, len(ranks))
        key = (self._phase, self._axis_of.get(ranks, "world"), op)
        calls, payloads, sent = self._sums.get(key, (0, 0, 0.0))
        self._sums[key] = (
            calls + 1,
            payloads + payload,
            sent + sent_bytes(op, payload, len(ranks)),
        )


def _axes_by_ranks(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """Map the ranks of this rank's groups to the names of their axes."""
    names = mesh.mesh_dim_names or ()
    groups = {tuple(dist.get_process_group_ranks(mesh.get_group(name))): name for name in names}
    if len(names) > 1:
        groups[tuple(sorted(mesh.mesh.flatten().tolist()))] = "_".join(names)
    return groups


def _group_ranks(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the global ranks of the group an op was called on."""
    for schema, value in zip(func._schema.arguments, args, strict=False):
        if schema.name == "group_name":
            # Private, and the only way from the name in a functional collective to its group;
            # tests/comm/test_ledger.py pins it.
            group = dist.distributed_c10d._resolve_process_group(value)  # pyright: ignore[reportPrivateUsage]
            return tuple(dist.get_process_group_ranks(group))
        if schema.name == "process_group":
            group = dist.ProcessGroup.unbox(value)
            return tuple(dist.get_process_group_ranks(group))
    raise NotImplementedError(f"the ledger finds no group among the arguments of {func}")


def _payload_bytes(op: str, args: tuple[Any, ...], num_ranks: int) -> int:
    """Return the bytes of the whole tensor: the largest of what goes in and what comes out.

    A gather's input is one rank's share, and a scatter's output is: the whole is N times the share.
    """
    sizes = [_bytes(arg) for arg in args[:2] if isinstance(arg, torch.Tensor | list | tuple)]
    if op in ("gather", "scatter"):  # only the root has the whole
        return min(size for size in sizes if size) * num_ranks
    is_functional_gather = op == "all_gather" and len(sizes) == 1
    return sizes[0] * num_ranks if is_functional_gather else max(sizes)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)
