"""Data parallelism: every rank holds the whole model and computes other samples.

Idea      The gradient of a sum over samples is the sum of the gradients, so N ranks that each take
          a part of the batch need one all-reduce a step. `naive` reduces each gradient after
          backward has ended; `bucketed` gathers gradients in flat buckets of 25 MiB and reduces a
          full one while backward still computes the gradients of earlier layers (Li et al.,
          PyTorch Distributed, VLDB 2020, section 3.2).
Layout    X[B_dp, ...]  W[...]  dW[...]: samples split over dp; weights and their gradients whole.
Forward   Y[B_dp] = f(X[B_dp], W), no communication
Backward  dW{sum dp} = f'(X[B_dp], W), then all_reduce: dW{sum dp} -> dW, once for each *global*
          batch, also where that is accumulated from several microbatches. A sum, not a mean: the
          loss is divided by the valid tokens of the global batch before backward.
Cost      A rank sends 2 (N-1)/N P bytes a step (P: bytes of the trained parameters), and as much
          for one byte a parameter, by which the ranks agree which parameters any of them used.
Limits    Any N. Buffers (running statistics of BatchNorm) are made equal at the start and then
          stay a rank's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.comm.axes import axes_of
from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.ledger import Entry, Phase, no_phase
from phalanx.comm.pending import Pending
from phalanx.comm.ranges import named
from phalanx.errors import TrainingError
from phalanx.parallel.compression.compressor import Compressor
from phalanx.parallel.reduce import (
    BUCKET_BYTES,
    GradientReducer,
    Parameters,
    buckets,
    make_equal,
)
from phalanx.parallel.sparse import SparseReducer, sparse_tables
from phalanx.parallel.split import Split, StateBytes, Target, entries_of
from phalanx.strategy import Strategy

Kind = Literal["naive", "bucketed"]


def layout(parameter_sizes: Sequence[int], frozen_bytes: int = 0) -> StateBytes:
    """Return what each rank holds: the whole of everything, whatever N is."""
    trained = sum(parameter_sizes)
    return StateBytes(
        parameter_bytes=trained + frozen_bytes,
        gathered_bytes=0,
        gradient_bytes=trained,
        unreduced_bytes=0,
        optimizer_bytes=2 * trained,
    )


class DataSplit(Split):
    """The axis dp, and all else that gradients are summed over; fsdp does so by itself."""

    axis = "dp"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._kind: Kind = cast(Kind, target.strategy.dp.kind)
        self._degrees = _degrees(target.strategy)

    @classmethod
    def is_asked(cls, target: Target) -> bool:
        """Return whether ranks hold full replicas that compute other tokens."""
        return bool(_degrees(target.strategy)) and target.strategy.fsdp.degree == 1

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the sums of gradients, and the agreement on which there are."""
        sizes = self.target.sizes()
        gradients = ("backward", len(buckets(sizes)), sum(sizes))
        if self._kind == "naive":
            gradients = ("reduce", len(sizes), sum(sizes))
        rows = (
            (phase, axis, "all_reduce", calls, size)
            for axis in self._degrees
            for phase, calls, size in (gradients, ("agree", 1, len(sizes)))
        )
        return entries_of(rows, self._degrees.__getitem__)

    def reducer(
        self, model: nn.Module, comm: Ranks, inner: GradientReducer | None
    ) -> GradientReducer:
        """Return what sums gradients over these axes."""
        return apply(model, comm, self._kind)


def apply(model: nn.Module, comm: Comm, kind: Kind = "bucketed") -> GradientReducer:
    """Make parameters and buffers equal, and return what will reduce their gradients."""
    make_equal(model, comm)
    tables = set(sparse_tables(model).values())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dense = [parameter for parameter in trained if parameter not in tables]
    reducer = (NaiveReducer if kind == "naive" else BucketedReducer)(dense, comm)
    return SparseReducer([p for p in trained if p in tables], reducer) if tables else reducer


def _degrees(strategy: Strategy) -> dict[str, int]:
    """Return the axes that gradients are summed over, and their degrees above 1."""
    axes = {name: axis.degree for name, axis in strategy.axes() if axis.degree > 1}
    return {name: axes[name] for name in axes_of("grad", axes)}


class NaiveReducer(GradientReducer):
    """One blocking all-reduce for each gradient, after backward."""

    def retrain(self, trained: list[nn.Parameter]) -> bool:
        """Reduce these gradients from now on; True."""
        self.parameters = trained
        return True

    def finish(self, phase: Phase = no_phase) -> None:
        """Reduce every gradient."""
        with phase("agree"):
            is_used = self.agree(self._has_gradient())
        with phase("reduce"):
            for parameter in itertools.compress(self.parameters, is_used):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.comm.all_reduce(local_shard(parameter.grad), "grad")


@dataclass
class _Bucket:
    """Parameters whose gradients are views of one flat buffer, and its reduction.

    Attributes:
        members: the parameters.
        views: of the buffer, one a member; there from the first gradient of a step to its end.
        flat: the buffer, likewise. Only gradients hold it afterwards, so it goes where they do.
        missing: members whose last backward of the step has not made a gradient yet.
        pending: the reduction under way.
    """

    members: list[nn.Parameter]
    views: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    flat: torch.Tensor | None = None
    missing: set[torch.Tensor] = field(default_factory=set)
    pending: Pending | None = None

    def open(self, comm: Comm) -> torch.Tensor:
        """Return the buffer, made where there is none."""
        if self.flat is None:
            locals_ = [local_shard(member) for member in self.members]
            sizes = [local.numel() for local in locals_]
            self.flat = comm.empty([sum(sizes)], locals_[0].detach())
            parts = self.flat.split(sizes)
            self.views = {
                member: part.view(local.shape)
                for member, part, local in zip(self.members, parts, locals_, strict=True)
            }
        return self.flat

    def close(self) -> None:
        """Leave the buffer to the gradients."""
        self.flat, self.views = None, {}


class BucketedReducer(GradientReducer):
    """Flat buckets, each reduced as soon as backward has filled it and those before it.

    Gradients become views of their bucket, so that nothing is copied back. Buckets start in one
    fixed order on all ranks, whatever order the hooks fire in, or collectives would be mismatched.
    A buffer lives as long as the gradients in it: forward holds none, as in one process.
    """

    def __init__(
        self, parameters: list[nn.Parameter], comm: Comm, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__([], comm)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._num_started = 0
        self._last = frozenset[nn.Parameter]()
        self._compressor: Compressor | None = None
        self._add(parameters)

    @override
    def compress(self, compressor: Compressor) -> bool:
        self._compressor = compressor
        return True

    def retrain(self, trained: list[nn.Parameter]) -> bool:
        """Reduce these gradients from now on; True.

        A parameter that is frozen keeps its bucket, which takes zeros for it: models that take
        turns freeze the other one in each step.
        """
        self._add([parameter for parameter in trained if parameter not in self._bucket_of])
        return True

    def _add(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = self.parameters + parameters
        sizes = [local_shard(parameter).nbytes for parameter in parameters]
        for indices in buckets(sizes, self._bucket_bytes):
            self._add_bucket([parameters[index] for index in indices])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _add_bucket(self, members: list[nn.Parameter]) -> None:
        dtypes = {member.dtype for member in members}
        for dtype in sorted(dtypes, key=str):  # one buffer a data type; nearly always one
            bucket = _Bucket([member for member in members if member.dtype == dtype])
            bucket.missing = set(bucket.members)
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(bucket.members, bucket)

    def before_backward(self, last: Parameters, reached: Parameters | None = None) -> None:
        """Arm the buckets of those that are reached for the last time."""
        self._last = frozenset(last)

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of[parameter]
        bucket.open(self.comm)
        view = bucket.views[cast(nn.Parameter, parameter)]
        grad = parameter.grad
        if grad is None:
            raise RuntimeError("autograd called the hook of a parameter without a gradient")
        if grad.is_sparse:  # of no module that `sparse_tables` finds
            grad = grad.to_dense()
        if local_shard(grad).data_ptr() != view.data_ptr():
            view.copy_(local_shard(grad))
            parameter.grad = _like(grad, view)
        if parameter in self._last:
            if bucket.pending is not None:
                raise TrainingError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was added to "
                    "again in one backward, after its reduction over dp had begun; reentrant "
                    "checkpointing of a weight that is used twice does so: give "
                    "torch.utils.checkpoint use_reentrant=False, or use dp:naive"
                )
            bucket.missing.discard(parameter)
            self._start_full_buckets()

    def _start_full_buckets(self) -> None:
        for bucket in self._buckets[self._num_started :]:
            if bucket.missing:
                return
            flat, number = bucket.open(self.comm), self._num_started
            with named(f"gradient bucket {number}"):
                if self._compressor is None:
                    bucket.pending = self.comm.all_reduce_start(flat, "grad")
                else:
                    parts = [*bucket.views.values()]
                    bucket.pending = self._compressor.start(number, flat, parts)
            self._num_started += 1

    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        """Start the buckets that unused parameters held back, and wait for all."""
        with phase("backward"):
            for bucket in self._buckets[self._num_started :]:
                bucket.open(self.comm)
                for member, view in bucket.views.items():
                    if member.grad is None:
                        view.zero_()
                bucket.missing.clear()
            self._start_full_buckets()
        with phase("agree"):
            is_used = self.agree(self._has_gradient())
        with phase("reduce"):
            self._wait()
        for member in itertools.compress(self.parameters, is_used):
            if member.grad is None:
                member.grad = _like(member, self._bucket_of[member].views[member])
        self._empty()

    def abandon(self) -> None:
        """Wait for what has begun, and leave the buckets as before a step."""
        self._wait()
        self._empty()
        self.forget_errors()

    @override
    def forget_errors(self) -> None:
        if self._compressor is not None:
            self._compressor.forget()

    def _wait(self) -> None:
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None

    def _empty(self) -> None:
        self._num_started = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.members)
            bucket.close()


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a part of a DTensor laid out as `tensor`, or itself if that is plain."""
    if isinstance(tensor, DTensor):
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return local
