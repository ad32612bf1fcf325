"""The base class of gradient reducers, and the all-reduce of gradients that are partial over tp.

data.py has the reducers of dp; sharded.py has the reducer for FSDP2, which reduces by itself.

Each rank of tp computes different rows, positions or features. So the gradient of a parameter that
is replicated over a sub-axis (norms and biases; with 2.5D tp every weight, over depth) is on each
rank one term of a sum over that sub-axis. The terms are summed once a step, in flat buckets, after
the sums over data.

[Note: Adding up in parts] Autograd adds the gradient of a second microbatch to the first gradient.
DTensor plans the addition of each new shape over all axes of the mesh together, which takes 0.1 s a
shape on three axes and 0.9 s on four (benchmarks/tensor). A hook that runs before autograd's
addition avoids this planning: it adds the local shards.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)
from typing_extensions import override

from phalanx.comm.axes import DENSE, EXPERT, ParameterAxes, axes_of
from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.ledger import Phase, no_phase
from phalanx.errors import StrategyError
from phalanx.models.attention import to_device
from phalanx.parallel.compression.compressor import Compressor

BUCKET_BYTES = 25 * 1024 * 1024

Parameters = Collection[nn.Parameter]


def buckets(parameter_sizes: Sequence[int], bucket_bytes: int | None = None) -> list[list[int]]:
    """Group parameters into buckets of at least `bucket_bytes`, last parameters first.

    If `bucket_bytes` is None, BUCKET_BYTES holds.

    The order follows backward, which makes the gradients of the last layers first. The last bucket
    may be smaller.

    Returns:
        For each bucket, the indices into `parameter_sizes`.
    """
    # Sizes 10 20 30 MiB, buckets of 25: [2] is full at 30, then [1 0] with 30.
    result: list[list[int]] = []
    filled = bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    for index in reversed(range(len(parameter_sizes))):
        if filled >= bucket_bytes:
            result.append([])
            filled = 0
        result[-1].append(index)
        filled += parameter_sizes[index]
    return result


@torch.no_grad()
def broadcast_parameters(model: nn.Module, comm: Comm) -> None:
    """Broadcast parameters and buffers from the first of the ranks that hold the same.

    Raises:
        StrategyError: a buffer is sparse.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise StrategyError(
                f"the buffer '{name}' is a {tensor.layout} tensor, which no collective broadcasts; "
                "store it in an attribute that is not a buffer, or pass it to the forward"
            )
        if not tensor.is_meta:
            comm.broadcast(local_shard(tensor), parameter_axes(tensor).sums)


def parameter_axes(tensor: torch.Tensor) -> ParameterAxes:
    """Return the sets of axes of a parameter that fsdp has not sharded."""
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        if EXPERT.split in names and tensor.placements[names.index(EXPERT.split)].is_shard():
            return EXPERT
    return DENSE


class GradientReducer:
    """Sums the gradients of a global batch over ranks; the base class does nothing.

    Call `before_backward` before each backward and `finish` after the last.
    """

    def __init__(self, parameters: list[nn.Parameter], comm: Comm) -> None:
        self.parameters = parameters
        self.comm = comm

    def before_backward(self, last: Parameters, reached: Parameters | None = None) -> None:
        """Prepare for the next backward.

        Args:
            last: parameters that backward reaches for the last time in this global batch.
            reached: all parameters of the pipeline stage that runs backward; None without a
                pipeline, for all parameters.
        """

    def finish(self, phase: Phase = no_phase) -> None:
        """Complete the sums over dp; a parameter that no rank used has the gradient None."""

    def set_trained(self, trained: list[nn.Parameter]) -> bool:
        """Reduce the gradients of `trained` from now on; return False if they cannot change."""
        del trained
        return False

    def compress(self, compressor: Compressor) -> bool:
        """Compress buckets of gradients from now on; return False if there are no buckets."""
        del compressor
        return False

    def keep(self) -> None:
        """Let the next backward, which only a check reads, neither reduce nor free anything."""

    def reset_step(self) -> None:
        """Reset after a backward that failed; the next backward begins a new step.

        This does not communicate: if the backward failed on one rank, the others are still in it,
        and this rank must raise its error. If it failed on every rank, they wait in their next
        forward or backward for the collectives in progress.
        """

    def reset_error_feedback(self) -> None:
        """Drop the compression errors of gradients that no step uses; all ranks must call this."""

    def after_step(self) -> None:
        """React to an optimizer step that has changed the weights."""

    def any_rank_used(self, used: list[bool]) -> list[bool]:
        """Return for each parameter whether any rank used it; `used` has the flags of this rank.

        A rank that used all parameters, the usual case, needs no result. It takes part in the
        all-reduce only for the other ranks, and does not wait for its GPU.
        """
        if not used:
            return used
        flags = to_device(torch.tensor(used, dtype=torch.uint8), self.comm.device)
        self.comm.all_reduce(flags, DENSE.sums, "max")  # one rank of ep may have used its experts
        return used if all(used) else flags.bool().tolist()

    def _has_gradient(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self.parameters]


class WrappingReducer(GradientReducer):
    """Forwards all calls except `set_trained` to an `inner` reducer; subclasses extend `finish`."""

    def __init__(
        self, parameters: list[nn.Parameter], comm: Comm, inner: GradientReducer | None
    ) -> None:
        super().__init__(parameters, comm)
        self._inner = inner or GradientReducer([], comm)

    @override
    def before_backward(self, last: Parameters, reached: Parameters | None = None) -> None:
        self._inner.before_backward(last, reached)

    @override
    def finish(self, phase: Phase = no_phase) -> None:
        self._inner.finish(phase)

    @override
    def compress(self, compressor: Compressor) -> bool:
        return self._inner.compress(compressor)

    @override
    def keep(self) -> None:
        self._inner.keep()

    @override
    def reset_step(self) -> None:
        self._inner.reset_step()

    @override
    def reset_error_feedback(self) -> None:
        self._inner.reset_error_feedback()

    @override
    def after_step(self) -> None:
        self._inner.after_step()


class ReplicaReducer(WrappingReducer):
    """Runs `inner`, then sums gradients over the sub-axes of tp that replicate the parameter."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], comm: Comm, inner: GradientReducer | None
    ) -> None:
        super().__init__([p for p in parameters if p.requires_grad], comm, inner)
        # With fsdp, autograd uses the gathered tensors instead of these parameters.
        is_sharded = comm.size("fsdp") > 1
        self._adders = accumulate_by_shard([] if is_sharded else self.parameters)

    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        """Complete all gradient sums, over data and over tp."""
        super().finish(phase)
        partial: dict[tuple[tuple[str, ...], torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in self.parameters:
            if isinstance(parameter.grad, DTensor):
                part = parameter.grad.to_local()
                if axes := partial_axes(parameter):
                    partial[axes, part.dtype].append(part)
        with phase("reduce"):
            for (axes, _), parts in partial.items():
                sum_in_buckets(parts, self.comm, axes)


def sum_in_buckets(parts: Sequence[torch.Tensor], comm: Comm, axes: Iterable[str]) -> None:
    """All-reduce tensors of one dtype over `axes`, in place, in flat buckets."""
    for indices in buckets([part.nbytes for part in parts]):
        chosen = [parts[index] for index in indices]
        flat = torch.cat([part.reshape(-1) for part in chosen])
        for axis in axes:
            comm.all_reduce(flat, axis)
        for part, total in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            part.copy_(total.view_as(part))


def accumulate_by_shard(parameters: Iterable[nn.Parameter]) -> list[Node]:
    """Accumulate gradients of DTensors shard by shard, see [Note: Adding up in parts].

    Args:
        parameters: the tensors that are leaves to autograd; with fsdp, the gathered ones.

    Returns:
        The autograd nodes that carry the hooks; keep a reference, or the hooks are lost.
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
    # Autograd would compute `grad + gradient` as DTensors. Here the prehook adds the local shards,
    # and hands the sum over as if it were the first gradient: `.grad` is None, so nothing is added
    # again.
    total, parameter.grad = parameter.grad, None
    local_shard(total).add_(local_shard(gradient))
    return (total,)  # autograd stores it without a copy, as the first gradient


def partial_axes(parameter: torch.Tensor) -> tuple[str, ...]:
    """Return the sub-axes of tp over which the gradient of `parameter` is partial.

    These are the sub-axes of more than one rank that replicate the parameter.
    """
    return tuple(
        axis
        for axis, size, placement in _tp_placements(parameter)
        if placement.is_replicate() and size > 1
    )


def is_fused(tensor: torch.Tensor) -> bool:
    """Return whether this rank's shard joins several slices of `tensor`, as for fused weights."""
    return any(isinstance(placement, _StridedShard) for _, _, placement in _tp_placements(tensor))


def _tp_placements(tensor: torch.Tensor) -> Iterator[tuple[str, int, Placement]]:
    """Yield name, size and placement for each sub-axis of tp in the mesh of a DTensor."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or ()
        for name, size, placement in zip(names, mesh.shape, tensor.placements, strict=True):
            if name in axes_of("tp", names):
                yield name, size, placement
