"""Cross-entropy by chunks of rows, so that the logits of a batch need never exist at once.

    for each chunk n of rows:  logits_nV = hidden_nD @ weight_VD.T          (in the compute dtype)
        for each block of n:   p = softmax(logits)                          (fp32; fp64 of fp64)
                               d = p - onehot(labels), 0 where ignored      (over the logits)
                               d_hidden_nD = d_nV @ weight_VD    d_weight_VD += d_nV.T @ hidden_nD

Both gradients are made in forward, where the logits are at hand; backward only scales them. So the
logits are computed once, nothing of the size rows x vocabulary is kept for backward, and only a
block of the logits ever exists in fp32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

IGNORE = -100
"""The label of a token that does not count."""

_CHUNK_ELEMENTS = 1 << 23
"""Logits held at a time: enough that adding up the weight's gradient costs less than making it."""

_BLOCK_ELEMENTS = {"cpu": 1 << 17}
"""Logits held in fp32 at a time, by device type: what stays in cache; elsewhere the chunk."""


def token_loss_sum(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, chunk_rows: int | None = None
) -> Tensor:
    """Sum the cross-entropy of the rows whose label is not IGNORE.

    Args:
        hidden_ND: what the output projection reads, in the compute dtype.
        weight_VD: the output projection, in its own dtype; cast to that of `hidden_ND`.
        labels_N: int64 in [0, V), or IGNORE.
        chunk_rows: rows whose logits are held at a time; a fixed number of logits if None.

    Returns:
        A 0-d tensor, fp32 (fp64 for fp64 input), in nats. Rows that are all ignored give exactly 0,
        and gradients that are exactly 0.
    """
    if chunk_rows is None:
        chunk_rows = max(1, _CHUNK_ELEMENTS // weight_VD.shape[0])
    needs_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    return cast(Tensor, _ChunkedLoss.apply(hidden_ND, weight_VD, labels_N, chunk_rows, needs_grad))


class _ChunkedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_rows: int,
        needs_grad: bool,
    ) -> Tensor:
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        compute_VD = weight_VD.to(hidden_ND.dtype)
        block_elements = _BLOCK_ELEMENTS.get(hidden_ND.device.type, _CHUNK_ELEMENTS)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        d_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        d_weight_VD = None
        for start in range(0, len(hidden_ND), chunk_rows):
            rows = slice(start, start + chunk_rows)
            hidden_nD = hidden_ND[rows]
            logits_nV = hidden_nD @ compute_VD.T
            block_rows = max(1, block_elements // logits_nV.shape[1])
            for logits_bV, label_b in zip(
                logits_nV.split(block_rows), labels_N[rows].split(block_rows), strict=True
            ):
                loss += _block_loss(logits_bV, label_b, wide)
            if d_hidden_ND is not None:
                torch.mm(logits_nV, compute_VD, out=d_hidden_ND[rows])
                part_VD = logits_nV.T @ hidden_nD
                d_weight_VD = part_VD.to(wide) if d_weight_VD is None else d_weight_VD.add_(part_VD)
        if needs_grad and d_weight_VD is None:  # there was no row
            d_weight_VD = torch.zeros_like(weight_VD, dtype=wide)
        ctx.save_for_backward(d_hidden_ND, d_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        d_hidden_ND, d_weight_VD = ctx.saved_tensors
        # With one dimension the factor takes part in type promotion: it is not rounded to bf16.
        scaled_ND = (d_hidden_ND * grad[None]).to(d_hidden_ND.dtype)
        return scaled_ND, (d_weight_VD * grad).to(ctx.weight_dtype), None, None, None


def _block_loss(logits_bV: Tensor, labels_b: Tensor, wide: torch.dtype) -> Tensor:
    """Return the sum of the block's losses; put d loss / d logits over the logits."""
    valid_b1 = (labels_b != IGNORE)[:, None]
    target_b1 = labels_b[:, None].where(valid_b1, 0)
    x_bV = logits_bV.to(wide)
    top_b1 = x_bV.amax(1, keepdim=True)
    at_target_b1 = x_bV.gather(1, target_b1) - top_b1
    p_bV = x_bV.sub_(top_b1).exp_()
    sum_b1 = p_bV.sum(1, keepdim=True)
    p_bV.mul_(valid_b1 / sum_b1).scatter_add_(1, target_b1, -valid_b1.to(wide))
    logits_bV.copy_(p_bV)
    return (sum_b1.log() - at_target_b1).where(valid_b1, 0).sum()
