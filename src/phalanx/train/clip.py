"""The norm of the full gradient over all ranks, and gradient clipping.

||g||_p = (sum over all elements of the model |g_i|^p)^(1/p), or max |g_i| for p = inf. Each element
of the model counts once, independent of its number of replicas: the sum of a sharded gradient
(DTensor) is all-reduced over the axes that shard it, the sum of a replicated one over none, and the
total over the pipeline stages, which hold different parameters. Clipping: Pascanu et al., On the
difficulty of training recurrent neural networks, 2013, section 3.2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.reductions import power_sum


def gradient_norm(gradients: Iterable[torch.Tensor], comm: Comm, p: float = 2.0) -> torch.Tensor:
    """Return the p-norm of all gradients taken as one vector, float64; equal on every rank.

    Args:
        gradients: DTensors, or plain tensors that are replicated on all ranks of a pipeline stage;
            without gradients that another stage counts.
        comm: communicator with the mesh axes of the DTensors, and the pipeline axis.
        p: 1, 2 or inf (any p > 0 is correct).
    """
    by_axes: dict[tuple[str, ...] | None, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        axes = sharded_axes(gradient) if isinstance(gradient, DTensor) else None
        local = local_shard(gradient)
        by_axes[axes].append(local.coalesce().values() if local.is_sparse else local)
    norms: list[torch.Tensor] = []
    for axes, locals_ in by_axes.items():
        norm = power_sum(locals_, p)
        for axis in axes or ():
            comm.all_reduce(norm, axis, "max" if math.isinf(p) else "sum")
        norms.append(norm)
    # In float64 on all stages, because their gradients may have different dtypes, or be absent.
    every = torch.stack(norms or [torch.zeros((), device=comm.device)]).double()
    total = every.max() if math.isinf(p) else every.sum()
    comm.all_reduce(total, "pp", "max" if math.isinf(p) else "sum")
    return total if math.isinf(p) else total.pow(1 / p)


def scale_to(gradients: Iterable[torch.Tensor], norm: float, limit: float) -> None:
    """Scale gradients of norm `norm` in place, so that a norm above `limit` becomes `limit`."""
    factor = min(1.0, limit / (norm + 1e-6))
    shards = [local_shard(gradient) for gradient in gradients]
    for shard in shards:
        if shard.is_sparse:
            shard.mul_(factor)
    if shards := [shard for shard in shards if not shard.is_sparse]:  # one GPU kernel for many
        torch._foreach_mul_(shards, factor)  # pyright: ignore[reportPrivateUsage]


def sharded_axes(gradient: DTensor) -> tuple[str, ...]:
    """Return the names of the mesh axes that shard `gradient`."""
    names = gradient.device_mesh.mesh_dim_names
    assert names is not None, "the axes of a mesh have names"
    axes: list[str] = []
    for name, placement in zip(names, gradient.placements, strict=True):
        if placement.is_partial():
            raise ValueError(f"a gradient is a partial sum over axis {name}; reduce it first")
        # FSDP2 over a sharded weight uses _StridedShard, which is not a subclass of Shard.
        if not placement.is_replicate():
            axes.append(name)
    return tuple(axes)
