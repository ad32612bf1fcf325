"""Cross-entropy by chunks of rows, so that the logits of a batch never exist at once.

    for each chunk n of rows:  logits_nV = hidden_nD @ weight_VD.T          (in the compute dtype)
                               p_nV = softmax(logits_nV)                    (fp32; fp64 of fp64)
                               d_nV = p_nV - onehot(labels_n), 0 where ignored
                               d_hidden_nD = d_nV @ weight_VD    d_weight_VD += d_nV.T @ hidden_nD

Both gradients are made in forward, where the logits are at hand; backward only scales them. So the
logits are computed once, and nothing of the size rows x vocabulary is kept for backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

IGNORE = -100
"""The label of a token that does not count."""

_CHUNK_ELEMENTS = 1 << 22
"""Logits held at a time."""


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
        valid_N = labels_N != IGNORE
        targets_N1 = labels_N.where(valid_N, 0)[:, None]
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        d_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_grad else None
        for start in range(0, len(hidden_ND), chunk_rows):
            rows = slice(start, start + chunk_rows)
            hidden_nD, target_n1 = hidden_ND[rows], targets_N1[rows]
            valid_n1 = valid_N[rows, None].to(wide)
            log_p_nV = torch.log_softmax(hidden_nD @ compute_VD.T, dim=-1, dtype=wide)
            loss -= (log_p_nV.gather(1, target_n1) * valid_n1).sum()
            if d_hidden_ND is None or d_weight_VD is None:
                continue
            d_nV = log_p_nV.exp_().mul_(valid_n1).scatter_add_(1, target_n1, -valid_n1)
            d_nV = d_nV.to(hidden_ND.dtype)
            torch.mm(d_nV, compute_VD, out=d_hidden_ND[rows])
            d_weight_VD += d_nV.T @ hidden_nD
        ctx.save_for_backward(d_hidden_ND, d_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        d_hidden_ND, d_weight_VD = ctx.saved_tensors
        d_hidden_ND = d_hidden_ND * grad.to(d_hidden_ND.dtype)
        return d_hidden_ND, (d_weight_VD * grad).to(ctx.weight_dtype), None, None, None
