"""BatchNorm over the rows of all ranks, as one process computes it over the global batch.

Idea      Mean and variance of a split batch are sums over ranks (Peng et al., MegDet, CVPR 2018,
          section 3.2). The variance sums the squared deviations from the mean of all rows, as in
          one process, because a difference of two large sums would lose precision.
Layout    X[B_data, C, ...]  mean[C]  variance[C]; statistics, also running ones, are replicated
Forward   all_reduce: (sum X, rows){sum data} -> mean; all_reduce: sum (X - mean)^2 -> variance
Backward  the gradients of mean and variance are sums over ranks: one all_reduce each
Cost      4 all_reduces of C numbers a layer and microbatch
Limits    Any N, also with uneven or no rows on a rank. Microbatches of an accumulation or a
          pipeline have separate statistics, as in one process that accumulates gradients: each has
          its own mean and variance, and updates the running statistics once, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.axes import AXIS_SETS
from phalanx.comm.comm import Comm, Ranks
from phalanx.comm.ledger import Entry
from phalanx.errors import ConfigError
from phalanx.parallel.split import Split, Target, entries_of
from phalanx.strategy import Strategy

# Private, and the only common base of torch's classes; tests/parallel/test_batch_norm.py pins it.
_BatchNorm = cast(type[Any], nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]

Statistics = Literal["global", "local"]
"""Scope of mean and variance in training: the rows of all ranks, or each rank's own rows."""


def check_statistics(statistics: str | None) -> None:
    """Raise a ConfigError unless `statistics` is None, 'global' or 'local'."""
    if statistics not in (None, "global", "local"):
        raise ConfigError(f"batch_norm is {statistics!r}; expected 'global' or 'local'")


def require_statistics(model: nn.Module, strategy: Strategy, statistics: Statistics | None) -> None:
    """Require a choice of `statistics` for a model with BatchNorm whose batch is split.

    A BatchNorm in `eval()` within a model in training is frozen, and needs no choice.

    Raises:
        ConfigError: `statistics` is None, and the rows of a BatchNorm are split over ranks or over
            the microbatches of a pipeline.
    """
    check_statistics(statistics)
    data_ranks = strategy.data_ranks
    name, norm = next(iter(_unfrozen_batch_norms(model)), ("", None))
    if norm is None or statistics is not None or data_ranks == strategy.pp.degree == 1:
        return
    found = f"{type(norm).__name__} '{name}' takes mean and variance over the rows of a batch"
    if data_ranks == 1:
        raise ConfigError(
            f"{found}, and a pipeline splits the batch into microbatches; set batch_norm='global' "
            "for statistics of each microbatch, as in one process that accumulates as many, "
            "or put the norm in eval() to use its running statistics"
        )
    raise ConfigError(
        f"{found}, and the batch is split over {data_ranks} ranks; set batch_norm='global' for "
        "statistics of all rows, as one process computes, or 'local' for statistics of each "
        "rank, as DistributedDataParallel does"
    )


class BatchNormSplit(Split):
    """BatchNorm statistics for rows that are split over data ranks; no parameter is split."""

    axis = "batch_norm"

    @classmethod
    def applies_to(cls, target: Target) -> bool:
        """Return whether ranks exchange statistics of a BatchNorm, in either scope."""
        is_split = target.strategy.data_ranks > 1 and target.batch_norm is not None
        return is_split and bool(_unfrozen_batch_norms(target.skeleton.model))

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        """Return the all-reduces, if each BatchNorm runs once and its input needs a gradient."""
        target = self.target
        sizes: dict[str, list[int]] = {"forward": [], "backward": []}
        norms = [
            norm
            for name, norm in _unfrozen_batch_norms(target.skeleton.model)
            if target.skeleton.named(name)
        ]
        if target.batch_norm == "local":
            running = [each for norm in norms for each in _running(norm)]
            sizes["forward"] = [sum(each.nbytes for each in running)] if running else []
        else:
            item_bytes = torch.promote_types(target.compute_dtype, torch.float32).itemsize
            for norm in norms:
                of_norm = [(norm.num_features + 1) * item_bytes, norm.num_features * item_bytes]
                sizes = {phase: [*of, *of_norm] for phase, of in sizes.items()}
        degrees = {axis: getattr(target.strategy, axis).degree for axis in AXIS_SETS["data"]}
        times = len(microbatches)
        rows = (
            (phase, axis, "all_reduce", times * len(of), times * sum(of))
            for axis in degrees
            for phase, of in sizes.items()
        )
        return entries_of(rows, degrees.__getitem__)

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Make each BatchNorm compute its statistics in the requested scope."""
        if self.target.batch_norm == "local":
            model.register_forward_hook(functools.partial(_broadcast_running_stats, comm))
            return
        # Separate process groups: in backward, sums of statistics interleave with gradient buckets,
        # which start later on a rank that does not use all parameters, so one group would see
        # different orders. All ranks create the groups, also pipeline stages without a BatchNorm.
        apart = comm.with_separate_groups("data")
        for _, norm in _unfrozen_batch_norms(model):
            norm.forward = functools.partial(_forward, norm, apart)


@torch.no_grad()
def _broadcast_running_stats(comm: Comm, model: nn.Module, *_: Any) -> None:
    """Copy the first rank's running statistics to all ranks, as DistributedDataParallel does."""
    running = [each for _, norm in batch_norms(model) for each in _running(norm)]
    if not model.training or not running:
        return
    flat = torch.cat(running)
    if comm.coord("data") > 0:
        flat.zero_()
    comm.all_reduce(flat, "data")
    for statistics, first in zip(running, flat.split([len(r) for r in running]), strict=True):
        statistics.data.copy_(first)  # `.data`: backward has saved the tensor, but does not read it


def _running(norm: Any) -> list[Tensor]:
    """Return the running mean and variance of a BatchNorm; empty if it tracks none."""
    return [norm.running_mean, norm.running_var] if norm.track_running_stats else []


def batch_norms(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of each BatchNorm in the model, of any number of dimensions."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]


def _unfrozen_batch_norms(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of each BatchNorm that uses batch statistics, that is, not frozen."""
    return [
        (name, norm)
        for name, norm in batch_norms(model)
        if norm.training or not model.training or norm.running_mean is None
    ]


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over the ranks of `data`; the gradient is summed over them too."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, comm: Comm) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.comm = comm
        return comm.all_reduce(own.clone(), "data")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Differentiable, so that gradient penalties work.
        return _sum_over_ranks(grad, ctx.comm), None


def _forward(norm: Any, comm: Comm, x: Tensor) -> Tensor:
    """Compute the forward of `norm`, in training with statistics over the rows of all ranks."""
    norm._check_input_dim(x)
    if not norm.training and norm.running_mean is not None:
        return F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    others = [dim for dim in range(x.ndim) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
    count = x_wide.new_full((1,), x.numel() // x.shape[1])
    # One message of C + 1 numbers: the sums, and the rows that a rank has, which may differ.
    sums = _sum_over_ranks(torch.cat([x_wide.sum(others), count]), comm)
    if x.numel() == x.shape[1] and sums[-1] == 1:  # one value on all ranks: torch refuses it too
        raise ValueError(f"Expected more than 1 value per channel when training, got {x.shape}")
    num_rows = sums[-1].detach().clamp(min=1)
    mean = sums[:-1] / num_rows
    centered = x_wide - mean.view(shape)
    # A second message, because the deviations are from the mean of all ranks.
    variance = _sum_over_ranks(centered.square().sum(others), comm) / num_rows
    if norm.training and norm.track_running_stats:
        _track(norm, mean.detach(), variance.detach(), num_rows)
    y = centered * (variance + norm.eps).rsqrt().view(shape)
    if norm.weight is not None:
        y = y * norm.weight.view(shape) + norm.bias.view(shape)
    return y.to(x.dtype)


def _sum_over_ranks(own: Tensor, comm: Comm) -> Tensor:
    return cast(Tensor, _SumOverRanks.apply(own, comm))


@torch.no_grad()
def _track(norm: Any, mean: Tensor, variance: Tensor, num_rows: Tensor) -> None:
    """Update the running statistics, with the unbiased variance."""
    norm.num_batches_tracked += 1
    momentum = norm.momentum
    if momentum is None:  # cumulative average, computed on the device without a host sync
        momentum = norm.num_batches_tracked.to(norm.running_mean.dtype).reciprocal()
    unbiased = variance * (num_rows / (num_rows - 1).clamp(min=1))
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
