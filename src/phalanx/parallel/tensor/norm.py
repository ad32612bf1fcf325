"""RMSNorm and LayerNorm over features that are split over ranks.

    y = (x - m) r w + b      r = 1 / sqrt(mean of (x - m)^2 + eps)      m = mean of x, 0 for RMSNorm

Means are over the features of all ranks. Forward all-reduces one number a row (LayerNorm two, in
two calls, because the variance is computed from x - m, without cancellation), backward one or two
in one call. Only x and the numbers of each row are saved for backward (Zhang and Sennrich 2019;
Ba et al. 2016).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.parallel.composite import once_differentiable
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.spec import Spec


def split_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    num_features: int,
    is_centred: bool,
    layout: Layout,
    spec: Spec,
) -> Tensor:
    """Normalize this rank's shard of an activation over the features of all ranks.

    Args:
        x: [B, T, D], this rank's shard.
        weight: [D], this rank's shard.
        bias: [D], this rank's shard, or None.
        eps: added to the mean of squares.
        num_features: D summed over all ranks.
        is_centred: True for LayerNorm, False for RMSNorm.
        layout: layout that splits x.
        spec: sharding of x, `layout.residual` or `layout.inner`.
    """
    out = _SplitNorm.apply(x, weight, bias, eps, num_features, is_centred, layout, spec)
    return cast(Tensor, out)


class _SplitNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        num_features: int,
        is_centred: bool,
        layout: Layout,
        spec: Spec,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        centred = x.to(wide)
        mean = None
        if is_centred:
            mean = layout.all_reduce_features(centred.sum(-1, keepdim=True), spec)
            centred = centred - mean.div_(num_features)
        squares = layout.all_reduce_features(centred.square().sum(-1, keepdim=True), spec)
        scale = squares.div_(num_features).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.num_features, ctx.layout, ctx.spec = num_features, layout, spec
        ctx.has_bias = bias is not None
        y = (centred * scale).mul_(weight.to(wide))
        if bias is not None:
            y.add_(bias.to(wide))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wide = scale.dtype
        grad = grad_outputs[0].to(wide)
        normal = x.to(wide) if mean is None else x.to(wide) - mean
        normal = normal * scale
        d_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        d_bias = grad.flatten(0, -2).sum(0).to(weight.dtype) if ctx.has_bias else None
        grad = grad * weight.to(wide)
        # With u = (x - m) r and g = dy w:  dx = r (g - u mean(g u) - mean(g)), without the last
        # term for RMSNorm. Both means are over the features of all ranks, in one message.
        sums = [(grad * normal).sum(-1, keepdim=True)]
        if mean is not None:
            sums.append(grad.sum(-1, keepdim=True))
        means = ctx.layout.all_reduce_features(torch.cat(sums, -1), ctx.spec)
        means.div_(ctx.num_features)
        grad.sub_(normal.mul_(means[..., :1]))
        if mean is not None:
            grad.sub_(means[..., 1:])
        return grad.mul_(scale).to(x.dtype), d_weight, d_bias, None, None, None, None, None
