"""The sum that the gradient of a parameter still owes where tp holds the parameter several times.

Every rank of tp computes other rows, places or features than the others. So the gradient of what is
not split over a sub-axis (norms and biases; in 2.5 dimensions every weight, over depth) is on each
rank a part of a sum over that axis. It is added up once a step, in flat buffers, after the sums
over data.

[Note: Adding up in parts] Autograd adds the gradient of a second microbatch to that of the first.
DTensor plans each new addition over all axes of the mesh together, which takes 0.1 s a shape on
three axes and 0.9 s on four (docs/log.md). So the parts are added, before autograd would.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from phalanx.comm.join import axis_size
from phalanx.comm.ledger import Phase, no_phase
from phalanx.comm.primitives import all_reduce, local_part
from phalanx.parallel.data import BUCKET_BYTES, GradientReducer, buckets


class ReplicaReducer(GradientReducer):
    """Reduces over data as `inner` does, then over the sub-axes of tp that hold replicas."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: DeviceMesh, inner: GradientReducer | None
    ) -> None:
        super().__init__([p for p in parameters if p.requires_grad], mesh)
        self._inner = inner
        # Under fsdp autograd sees other parameters than these: what was gathered.
        is_sharded = "fsdp" in (mesh.mesh_dim_names or ())
        self._adders = add_up_in_parts([] if is_sharded else self.parameters)

    def before_backward(self, *, is_last: bool) -> None:
        """Tell the reducer over data."""
        if self._inner is not None:
            self._inner.before_backward(is_last=is_last)

    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        """Return when every gradient is whole."""
        if self._inner is not None:
            self._inner.finish(phase)
        owed: dict[tuple[tuple[str, ...], torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in self.parameters:
            if isinstance(parameter.grad, DTensor):
                part = parameter.grad.to_local()
                if axes := owed_axes(parameter):
                    owed[axes, part.dtype].append(part)
        with phase("reduce"):
            for (axes, _), parts in owed.items():
                for indices in buckets([part.nbytes for part in parts], BUCKET_BYTES):
                    self._sum([parts[index] for index in indices], axes)

    def _sum(self, parts: list[torch.Tensor], axes: tuple[str, ...]) -> None:
        flat = torch.cat([part.reshape(-1) for part in parts])
        for axis in axes:
            all_reduce(flat, self.mesh, axis)
        for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(total.view_as(part))


def add_up_in_parts(parameters: Iterable[nn.Parameter]) -> list[Node]:
    """Have gradients of DTensors added part by part, see [Note: Adding up in parts].

    Args:
        parameters: as autograd sees them.

    Returns:
        The nodes of autograd that do it, as long as somebody holds them.
    """
    nodes: list[Node] = []
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            node = get_gradient_edge(parameter).node
            node.register_prehook(functools.partial(_add_part, parameter))
            nodes.append(node)
    return nodes


@torch.no_grad()
def _add_part(
    parameter: torch.Tensor, gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor] | None:
    (gradient,) = gradients
    if parameter.grad is None or gradient is None:
        return None
    total, parameter.grad = parameter.grad, None
    local_part(total).add_(local_part(gradient))
    return (total,)  # which autograd takes for the first gradient, and does not copy


def owed_axes(parameter: torch.Tensor) -> tuple[str, ...]:
    """Return the sub-axes of tp over which `parameter` is the same on all ranks."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if name.split("_")[0] == "tp"
        and placement.is_replicate()
        and axis_size(parameter.device_mesh, name) > 1
    )


def is_fused(tensor: torch.Tensor) -> bool:
    """Tell whether this rank's part of `tensor` is several parts of the whole: of fused maps."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(
        name.split("_")[0] == "tp" and isinstance(placement, _StridedShard)
        for name, placement in zip(names, tensor.placements, strict=True)
    )
