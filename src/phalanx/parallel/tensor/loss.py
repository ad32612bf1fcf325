"""Cross-entropy over logits whose vocabulary is split, without gathering the logits.

    m = max of the logits                                 all_reduce of one number a row
    s = sum of exp(logits - m), t = the label's logit     all_reduce of two numbers a row
    loss = log s - (t - m)      d loss / d logits = exp(logits - m) / s - onehot(label)

Forward overwrites the logits with their gradient, as models/loss.py does; backward only scales the
gradient, in place. For the split see Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.models.kernels import chunk_starts, chunked_type
from phalanx.models.loss import IGNORE
from phalanx.parallel.composite import once_differentiable
from phalanx.parallel.tensor.layout import Layout

_BLOCK_ELEMENTS = {"cpu": 1 << 17, "meta": 1 << 62}
"""Number of logits held in fp32 at a time, by device type: as many as fit the cache on a CPU, and
8 M on devices that are not listed."""


def check_range(ids: Tensor, num_ids: int, what: str) -> None:
    """Raise an error for ids that are in no rank's shard; they would silently count as zeros.

    Raises:
        IndexError: an id is out of [0, num_ids). On a GPU an asynchronous device assertion fails
            instead, so that the host does not wait.
    """
    if ids.is_meta:
        return
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < num_ids)).all())  # pyright: ignore[reportPrivateUsage]
    elif ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < num_ids):
        raise IndexError(
            f"{what} is out of range: from {int(ids.min())} to {int(ids.max())}, and the "
            f"vocabulary has {num_ids}"
        )


def token_loss_sum(logits_NV: Tensor, labels_N: Tensor, num_ids: int, layout: Layout) -> Tensor:
    """Sum the cross-entropy over the rows of all ranks whose label is not IGNORE.

    Args:
        logits_NV: this rank's rows and shard of the vocabulary, split as `layout.inner`;
            overwritten.
        labels_N: labels of this rank's rows, int64 in [0, num_ids), or IGNORE.
        num_ids: size of the full vocabulary.
        layout: layout that splits the logits.

    Returns:
        A 0-d tensor, equal on every rank of tp, fp32 (fp64 for fp64 logits), in nats.
    """
    return cast(Tensor, _SplitLoss.apply(logits_NV, labels_N, num_ids, layout))


class _SplitLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, num_ids: int, layout: Layout
    ) -> Tensor:
        logits_NV = logits_NV.detach()
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        ids = layout.features(layout.inner, num_ids)
        axis = layout.inner.features
        assert axis is not None
        top_N = logits_NV.new_full((len(logits_NV),), -torch.inf, dtype=wide)
        if ids:
            top_N = logits_NV.amax(1).to(wide)
        layout.comm.all_reduce(top_N, axis, "max")
        is_valid_N = labels_N != IGNORE
        check_range(labels_N.where(is_valid_N, 0), num_ids, "a label")
        is_mine_N = is_valid_N & (labels_N >= ids.start) & (labels_N < ids.stop)
        target_N1 = (labels_N - ids.start).where(is_mine_N, 0)[:, None]
        step = max(1, _BLOCK_ELEMENTS.get(chunked_type(logits_NV), 1 << 23) // max(1, len(ids)))
        starts = chunk_starts(logits_NV, step) if ids else []
        blocks = [slice(n, n + step) for n in starts]
        sums_2N = logits_NV.new_zeros((2, len(logits_NV)), dtype=wide)
        # Pass 1 over the logits: this shard's part of the sum, and the label's logit if it is here.
        for rows in blocks:
            x_bV = logits_NV[rows] - top_N[rows, None]
            at_target_b = x_bV.gather(1, target_N1[rows])[:, 0]
            sums_2N[1, rows] = at_target_b.where(is_mine_N[rows], 0)
            sums_2N[0, rows] = x_bV.exp_().sum(1)
        layout.comm.all_reduce(sums_2N, axis)
        sum_N, at_target_N = sums_2N
        loss = (sum_N.log() - at_target_N).where(is_valid_N, 0).sum()
        if ctx.needs_input_grad[0]:
            # Pass 2, after the sum over all shards is known: the logits become their gradient.
            for rows in blocks:
                p_bV = (logits_NV[rows] - top_N[rows, None]).exp_()
                p_bV.mul_((is_valid_N[rows] / sum_N[rows])[:, None])
                p_bV.scatter_add_(1, target_N1[rows], -is_mine_N[rows, None].to(wide))
                logits_NV[rows] = p_bV.to(logits_NV.dtype)
            ctx.d_logits_NV = logits_NV
        return layout.all_reduce_rows(loss, layout.inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_logits_NV: Tensor | None = ctx.d_logits_NV
        if d_logits_NV is None:
            raise RuntimeError("the backward of the split loss runs only once; call forward again")
        ctx.d_logits_NV = None  # release the largest tensor of the step as soon as it is used
        # A 1-d factor takes part in type promotion, so it is not rounded to bf16 first.
        return d_logits_NV.mul_(grad_outputs[0][None]), None, None, None
