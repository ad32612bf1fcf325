"""The base of gradient reducers, and the all-reduce of gradients that tp leaves partial.

The subclasses are data.py (dp) and sharded.py, where FSDP2 reduces.

Every rank of tp computes other rows, positions or features than the others. So the gradient of a
parameter that is not split over a sub-axis (norms and biases; in 2.5 dimensions every weight, over
depth) is on each rank one term of a sum over that axis. The terms are added up once a step, in flat
buckets, after the sums over data.

[Note: Adding up in parts] Autograd adds the gradient of a second microbatch to the first one.
DTensor plans each new addition over all axes of the mesh together, which takes 0.1 s a shape on
three axes and 0.9 s on four (benchmarks/tensor). So the parts are added, before autograd would.
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

from phalanx.comm.axes import axes_of
from phalanx.comm.comm import Comm, local_shard
from phalanx.comm.ledger import Phase, no_phase
from phalanx.errors import StrategyError
from phalanx.models.attention import to_device
from phalanx.parallel.compression.compressor import Compressor

BUCKET_BYTES = 25 * 1024 * 1024

Parameters = Collection[nn.Parameter]


def buckets(parameter_sizes: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> list[list[int]]:
    """Cut parameters into buckets of at least `bucket_bytes`, last parameters first.

    Backward makes the gradients of the last layers first, so their bucket is full first.

    Returns:
        For each bucket, the indices into `parameter_sizes`.
    """
    result: list[list[int]] = []
    filled = bucket_bytes
    for index in reversed(range(len(parameter_sizes))):
        if filled >= bucket_bytes:
            result.append([])
            filled = 0
        result[-1].append(index)
        filled += parameter_sizes[index]
    return result


@torch.no_grad()
def make_equal(model: nn.Module, comm: Comm) -> None:
    """Give parameters and buffers of the first rank to all that sum gradients with it.

    Raises:
        StrategyError: a buffer is sparse.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise StrategyError(
                f"the buffer '{name}' is a {tensor.layout} tensor, which no collective broadcasts; "
                "hold it in an attribute that is no buffer, or give it to the forward"
            )
        if not tensor.is_meta:
            comm.broadcast(local_shard(tensor), "grad")


class GradientReducer:
    """Reduces gradients over dp once for each global batch; the base does nothing.

    Call `before_backward` before each backward and `finish` after the last.
    """

    def __init__(self, parameters: list[nn.Parameter], comm: Comm) -> None:
        self.parameters = parameters
        self.comm = comm

    def before_backward(self, last: Parameters, reached: Parameters | None = None) -> None:
        """Say that a backward follows.

        Args:
            last: the parameters that it reaches for the last time in this global batch.
            reached: all parameters that it reaches, in a stage of a pipeline; every one if None.
        """

    def finish(self, phase: Phase = no_phase) -> None:
        """Return when every gradient is the sum over dp; None where no rank used the parameter."""

    def retrain(self, trained: list[nn.Parameter]) -> bool:
        """Reduce these parameters from now on; return False where it is settled which are."""
        del trained
        return False

    def compress(self, compressor: Compressor) -> bool:
        """Have buckets of gradients compressed; return False where there are none."""
        del compressor
        return False

    def abandon(self) -> None:
        """Forget a backward that has failed on every rank, so that the next begins a step anew."""

    def forget_errors(self) -> None:
        """Drop what compression has cut off, of gradients that no step uses; on all ranks alike."""

    def after_step(self) -> None:
        """Say that an optimizer has changed the weights."""

    def agree(self, used: list[bool]) -> list[bool]:
        """Return for each parameter whether any rank used it, from whether this one did.

        A rank that used all of them, as nearly every rank does, knows the answer: it takes part for
        the others, and does not wait for its GPU.
        """
        if not used:
            return used
        flags = to_device(torch.tensor(used, dtype=torch.uint8), self.comm.device)
        self.comm.all_reduce(flags, "grad", "max")
        return used if all(used) else flags.bool().tolist()

    def _has_gradient(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self.parameters]


class OuterReducer(GradientReducer):
    """Does more once an `inner` reducer, if there is one, has finished; passes other calls on."""

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
    def abandon(self) -> None:
        self._inner.abandon()

    @override
    def forget_errors(self) -> None:
        self._inner.forget_errors()

    @override
    def after_step(self) -> None:
        self._inner.after_step()


class ReplicaReducer(OuterReducer):
    """Reduces over data as `inner` does, then over the sub-axes of tp that hold replicas."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], comm: Comm, inner: GradientReducer | None
    ) -> None:
        super().__init__([p for p in parameters if p.requires_grad], comm, inner)
        # Under fsdp autograd sees other parameters than these: what was gathered.
        is_sharded = comm.size("fsdp") > 1
        self._adders = add_up_in_parts([] if is_sharded else self.parameters)

    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        """Return when every gradient is whole."""
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
    """Sum tensors of one data type over axes, in place, in flat buckets."""
    for indices in buckets([part.nbytes for part in parts]):
        chosen = [parts[index] for index in indices]
        flat = torch.cat([part.reshape(-1) for part in chosen])
        for axis in axes:
            comm.all_reduce(flat, axis)
        for part, total in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            part.copy_(total.view_as(part))


def add_up_in_parts(parameters: Iterable[nn.Parameter]) -> list[Node]:
    """Have gradients of DTensors added part by part, see [Note: Adding up in parts].

    The parameters are those that autograd sees.

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
    local_shard(total).add_(local_shard(gradient))
    return (total,)  # which autograd takes for the first gradient, and does not copy


def partial_axes(parameter: torch.Tensor) -> tuple[str, ...]:
    """Return the axes of tp over which the gradient of `parameter` is a part of a sum.

    Those are the axes on which all ranks hold the same of it.
    """
    return tuple(
        axis
        for axis, size, placement in _over_tp(parameter)
        if placement.is_replicate() and size > 1
    )


def is_fused(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part of `tensor` is several parts of the whole: of fused maps."""
    return any(isinstance(placement, _StridedShard) for _, _, placement in _over_tp(tensor))


def _over_tp(tensor: torch.Tensor) -> Iterator[tuple[str, int, Placement]]:
    """Yield how a DTensor lies over each sub-axis of tp: name, size and placement."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or ()
        for name, size, placement in zip(names, mesh.shape, tensor.placements, strict=True):
            if name in axes_of("tp", names):
                yield name, size, placement
