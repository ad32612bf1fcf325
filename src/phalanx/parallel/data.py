"""Data parallelism: every rank holds the full model and computes different samples.

Idea      The gradient of a sum over samples is the sum of their gradients, so N ranks that each
          compute a part of the batch need one all-reduce a step. `naive` reduces each gradient
          after backward has ended; `bucketed` collects gradients in flat buckets of 25 MiB and
          reduces a full bucket while backward still computes the gradients of earlier layers (Li
          et al., PyTorch Distributed, VLDB 2020, section 3.2).
Layout    X[B_dp, ...]  W[...]  dW[...]: samples split over dp; full weights and gradients.
Forward   Y[B_dp] = f(X[B_dp], W), no communication
Backward  dW{sum dp} = f'(X[B_dp], W), then all_reduce: dW{sum dp} -> dW, once for each *global*
          batch, even if several microbatches accumulate it. A sum, not a mean: the loss is divided
          by the valid tokens of the global batch before backward.
Cost      A rank sends 2 (N-1)/N P bytes a step (P: bytes of the trained parameters). A second
          all-reduce, of one byte a parameter, finds the parameters that at least one rank used.
Limits    Any N. Buffers (running statistics of BatchNorm) are broadcast at the start and are not
          synchronized afterwards.
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

from phalanx.comm.axes import DENSE, EXPERT, axes_of
from phalanx.comm.comm import Comm, Ranks, local_shard
from phalanx.comm.ledger import Entry, Phase, no_phase
from phalanx.comm.pending import Pending
from phalanx.comm.ranges import named
from phalanx.errors import TrainingError
from phalanx.parallel.compression.compressor import Compressor
from phalanx.parallel.reduce import (
    GradientReducer,
    Parameters,
    broadcast_parameters,
    buckets,
    parameter_axes,
)
from phalanx.parallel.sparse import SparseReducer, sparse_tables
from phalanx.parallel.split import Split, StateBytes, Target, entries_of
from phalanx.strategy import Strategy

Kind = Literal["naive", "bucketed"]


def replicated_bytes(parameter_sizes: Sequence[int], frozen_bytes: int = 0) -> StateBytes:
    """Return the bytes on each rank: all state is replicated, for any number of ranks."""
    trained = sum(parameter_sizes)
    return StateBytes(
        parameter_bytes=trained + frozen_bytes,
        gathered_bytes=0,
        gradient_bytes=trained,
        unreduced_bytes=0,
        optimizer_bytes=2 * trained,
    )


class DataSplit(Split):
    """The axis dp and every other axis of gradient sums, in jobs without fsdp."""

    axis = "dp"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._kind: Kind = cast(Kind, target.strategy.dp.kind)
        self._degrees = _degrees(target.strategy)

    @classmethod
    def applies_to(cls, target: Target) -> bool:
        """Return whether several ranks hold full replicas and compute different tokens."""
        is_summed = bool(_degrees(target.strategy)) and not target.same_rows
        return is_summed and target.strategy.fsdp.degree == 1

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the all-reduces of gradients, and of the flags for used parameters."""
        rows: list[tuple[str, str, str, int, int]] = []
        for axis in self._degrees:
            for axes in (DENSE, EXPERT):
                if axis in axes_of(axes.sums, self._degrees):
                    sizes = self.target.sizes(axes=axes)
                    gradients = ("backward", axis, "all_reduce", len(buckets(sizes)), sum(sizes))
                    if self._kind == "naive":
                        gradients = ("reduce", axis, "all_reduce", len(sizes), sum(sizes))
                    rows.append(gradients)
            num_trained = len(self.target.sizes())
            rows.append(("agree", axis, "all_reduce", 1, num_trained))
        return entries_of(rows, self._degrees.__getitem__)

    def reducer(
        self, model: nn.Module, comm: Ranks, inner: GradientReducer | None
    ) -> GradientReducer:
        """Return the reducer that sums gradients over these axes."""
        return apply(model, comm, self._kind)


def apply(model: nn.Module, comm: Comm, kind: Kind = "bucketed") -> GradientReducer:
    """Broadcast parameters and buffers, and return the reducer of the gradients."""
    broadcast_parameters(model, comm)
    tables = set(sparse_tables(model).values())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dense = [parameter for parameter in trained if parameter not in tables]
    reducer = (NaiveReducer if kind == "naive" else BucketedReducer)(dense, comm)
    return SparseReducer([p for p in trained if p in tables], reducer) if tables else reducer


def _degrees(strategy: Strategy) -> dict[str, int]:
    """Return the axes over which gradients are summed, with their degrees; degree 1 is left out."""
    axes = {name: axis.degree for name, axis in strategy.axes() if axis.degree > 1}
    return {name: axes[name] for name in axes_of(DENSE.sums, axes)}


class NaiveReducer(GradientReducer):
    """One blocking all-reduce for each gradient, after backward."""

    def set_trained(self, trained: list[nn.Parameter]) -> bool:
        """Reduce the gradients of `trained` from now on; return True."""
        self.parameters = trained
        return True

    def finish(self, phase: Phase = no_phase) -> None:
        """Reduce every gradient."""
        with phase("agree"):
            is_used = self.any_rank_used(self._has_gradient())
        with phase("reduce"):
            for parameter in itertools.compress(self.parameters, is_used):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.comm.all_reduce(local_shard(parameter.grad), parameter_axes(parameter).sums)


@dataclass
class _Bucket:
    """Parameters whose gradients are views of one flat buffer, and the reduction of that buffer.

    Attributes:
        members: the parameters.
        sums: the set of axes over which their gradients are summed.
        views: member -> its view of `flat`; empty while there is no buffer.
        flat: the buffer, from the first gradient of a step to the end of the step. After that only
            the gradients refer to its memory, so that it is freed together with them.
        missing: members that still wait for their last gradient of the step.
        pending: the all-reduce in progress, or None.
    """

    members: list[nn.Parameter]
    sums: str
    views: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    flat: torch.Tensor | None = None
    missing: set[torch.Tensor] = field(default_factory=set)
    pending: Pending | None = None

    def open(self, comm: Comm) -> torch.Tensor:
        """Return the buffer; allocate it and its views if there is none."""
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
        """Drop the references to the buffer, so that only gradients keep it allocated."""
        self.flat, self.views = None, {}


class BucketedReducer(GradientReducer):
    """Reduces gradients in flat buckets, each once backward has filled it and all earlier buckets.

    Gradients become views of their bucket, so that results need no copy. All ranks start buckets
    in one fixed order, whatever the order of the hooks, because collectives would mismatch
    otherwise. A buffer lives as long as its gradients, so forward holds no buffer once the
    gradients are set to None.
    """

    def __init__(
        self, parameters: list[nn.Parameter], comm: Comm, bucket_bytes: int | None = None
    ) -> None:
        super().__init__([], comm)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._num_started = 0
        self._last = frozenset[nn.Parameter]()
        self._has_failed = False
        self._compressor: Compressor | None = None
        self._add(parameters)

    @override
    def compress(self, compressor: Compressor) -> bool:
        self._compressor = compressor
        return True

    def set_trained(self, trained: list[nn.Parameter]) -> bool:
        """Reduce the gradients of `trained` from now on; return True.

        A frozen parameter keeps its place in its bucket, filled with zeros, because scripts with
        two alternating models (such as a GAN) freeze one of them in each step.
        """
        self._add([parameter for parameter in trained if parameter not in self._bucket_of])
        return True

    def _add(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = self.parameters + parameters
        kinds: dict[str, list[int]] = {}
        for number, parameter in enumerate(parameters):
            kinds.setdefault(parameter_axes(parameter).sums, []).append(number)
        parts: list[tuple[str, list[int]]] = []
        for sums, numbers in kinds.items():
            sizes = [local_shard(parameters[number]).nbytes for number in numbers]
            of_kind = buckets(sizes, self._bucket_bytes)
            parts += [(sums, [numbers[index] for index in indices]) for indices in of_kind]
        # In the order in which backward fills them: a bucket waits for its first parameter.
        for sums, numbers in sorted(parts, key=lambda part: -min(part[1])):
            members = [parameters[number] for number in numbers]
            dtypes = {member.dtype for member in members}
            for dtype in sorted(dtypes, key=str):  # one buffer a data type; nearly always one
                bucket = _Bucket([member for member in members if member.dtype == dtype], sums)
                bucket.missing = set(bucket.members)
                self._buckets.append(bucket)
                self._bucket_of |= dict.fromkeys(bucket.members, bucket)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def before_backward(self, last: Parameters, reached: Parameters | None = None) -> None:
        """Store the parameters that the next backward reaches for the last time in the step."""
        self._last = frozenset(last)
        if self._has_failed:
            self._has_failed = False
            self._wait()
            self._empty()
            self.reset_error_feedback()

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of[parameter]
        bucket.open(self.comm)
        # In the first backward of a step the gradient is a tensor of autograd, and is moved into
        # the bucket. From then on it is the view itself, to which autograd adds later microbatches
        # in place.
        view = bucket.views[cast(nn.Parameter, parameter)]
        grad = parameter.grad
        if grad is None:
            raise RuntimeError("autograd called the hook of a parameter without a gradient")
        if grad.is_sparse:  # from a module that `sparse_tables` does not find
            grad = grad.to_dense()
        if local_shard(grad).data_ptr() != view.data_ptr():
            view.copy_(local_shard(grad))
            parameter.grad = _like(grad, view)
        if parameter in self._last:
            if bucket.pending is not None:
                raise TrainingError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was "
                    "accumulated again in one backward, after its reduction over dp had begun; "
                    "reentrant checkpointing of a weight that is used twice causes this: pass "
                    "use_reentrant=False to torch.utils.checkpoint, or use dp:naive"
                )
            bucket.missing.discard(parameter)
            self._start_full_buckets()

    def _start_full_buckets(self) -> None:
        #   backward    layer 3    | layer 2    | layer 1    | layer 0    | finish
        #   bucket 0    fills ..... full, all_reduce ......
        #   bucket 1                 fills ...... full, all_reduce ......
        #   bucket 2                              fills ................... all_reduce
        #
        # A full bucket waits for the buckets before it: all ranks call in one order, whatever the
        # order in which their gradients become ready.
        for bucket in self._buckets[self._num_started :]:
            if bucket.missing:
                return
            flat, number = bucket.open(self.comm), self._num_started
            with named(f"gradient bucket {number}"):
                if self._compressor is None:
                    bucket.pending = self.comm.all_reduce_start(flat, bucket.sums)
                else:
                    parts = [*bucket.views.values()]
                    bucket.pending = self._compressor.start(number, flat, parts, bucket.sums)
            self._num_started += 1

    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        """Start the buckets that unused parameters have delayed, and wait for all buckets."""
        with phase("backward"):
            for bucket in self._buckets[self._num_started :]:
                bucket.open(self.comm)
                for member, view in bucket.views.items():
                    if member.grad is None:
                        view.zero_()
                # A parameter that this rank did not use counts as zeros, so that the ranks that
                # used it get their sum: every bucket is reduced on every rank.
                bucket.missing.clear()
            self._start_full_buckets()
        with phase("agree"):
            is_used = self.any_rank_used(self._has_gradient())
        with phase("reduce"):
            self._wait()
        for member in itertools.compress(self.parameters, is_used):
            if member.grad is None:
                # Another rank used the parameter: this one has the sum, too, and steps as the
                # others do.
                member.grad = _like(member, self._bucket_of[member].views[member])
        self._empty()

    def reset_step(self) -> None:
        """Let the next backward wait for reductions in progress, and reset the buckets."""
        self._has_failed = True

    @override
    def reset_error_feedback(self) -> None:
        if self._compressor is not None:
            self._compressor.reset_errors()

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
    """Wrap `local` as a DTensor with the layout of `tensor`, unless `tensor` is a plain tensor."""
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
