"""Cross-entropy in chunks of rows, so that the logits of a batch need not exist all at once.

    for each chunk n of rows:  logits_nV = hidden_nD @ weight_VD.T          (in the compute dtype)
        for each block of n:   d = softmax(logits) - onehot(labels)         (overwrites the logits)
                               d_hidden_nD = d_nV @ weight_VD    d_weight_VD += d_nV.T @ hidden_nD

Forward computes both gradients while the logits exist; backward only scales them. So the logits are
computed once, no tensor of size rows x vocabulary is saved for backward, and only one block of the
logits at a time exists in fp32 (fp64 for fp64 inputs). The loss and the weight's gradient are
summed in fp32 too, because sums of thousands of terms in bf16 would lose the small terms.

Each chunk reads and writes the full gradient of the weight, for any number of rows. So a chunk has
as many rows as memory allows, `chunk_rows`, so that the matrix products dominate the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.models.kernels import chunk_starts, chunked_type

BlockLoss = Callable[[Tensor, Tensor, torch.dtype], Tensor]

IGNORE = -100
"""The label of a token that does not count in the loss."""

_CHUNK_BYTES = {"cpu": 1 << 29, "cuda": 1 << 30, "meta": 1 << 62}
"""Largest number of bytes of logits held at a time, by device type: with a vocabulary of 128,256,
1,046 rows in fp32 on a CPU, and 4,185 rows in bf16 on a GPU."""

_CPU_CHUNK_ROWS = 1024
"""Largest number of rows in a chunk on a CPU, where more rows gain little; with small vocabularies
a chunk may have more rows, up to 8 M logits."""

_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26, "meta": 1 << 62}
"""Number of logits held in fp32 at a time: as many as fit a core's cache; 256 MiB on a GPU."""


def chunk_rows(vocab_size: int, dtype: torch.dtype, device_type: str) -> int:
    """Return the number of rows in a chunk, for logits of `dtype` on a device."""
    known = device_type if device_type in _CHUNK_BYTES else "cuda"
    most = _CHUNK_BYTES[known] // (vocab_size * dtype.itemsize)
    if known == "cpu":
        most = min(most, max(_CPU_CHUNK_ROWS, (1 << 23) // vocab_size))
    return max(1, most)


def token_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    num_rows: int | None = None,
    compiles: bool = False,
) -> Tensor:
    """Sum the cross-entropy of the rows whose label is not IGNORE.

    Args:
        hidden_ND: input of the output projection, in the compute dtype.
        weight_VD: weight of the output projection; cast to the dtype of `hidden_ND`.
        labels_N: int64 in [0, V), or IGNORE.
        num_rows: number of rows in a chunk; `chunk_rows` if None.
        compiles: whether torch.compile fuses the passes over logits on a GPU.

    Returns:
        A 0-d tensor, fp32 (fp64 for fp64 input), in nats. If all rows are ignored, the loss and the
        gradients are exactly 0.
    """
    device_type = chunked_type(hidden_ND)
    if num_rows is None:
        num_rows = chunk_rows(weight_VD.shape[0], hidden_ND.dtype, device_type)
    needs_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    block_elements = _BLOCK_ELEMENTS.get(device_type, _BLOCK_ELEMENTS["cuda"])
    block_loss = _block_loss_in_cache if device_type == "cpu" else _block_loss
    if compiles and device_type not in ("cpu", "meta"):
        block_loss = _compiled_block_loss()
    settings = num_rows, needs_grad, block_loss, max(1, block_elements // len(weight_VD))
    return cast(Tensor, _ChunkedLoss.apply(hidden_ND, weight_VD, labels_N, *settings))


class _ChunkedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        num_rows: int,
        needs_grad: bool,
        block_loss: BlockLoss,
        block_rows: int,
    ) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        compute_VD = weight_VD.to(hidden_ND.dtype)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        d_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        d_weight_VD, is_trained = None, ctx.needs_input_grad[1]
        # One chunk, V = 128,256, n = 1,024 rows; blocks are of as many logits as fit a cache:
        #
        #   logits_nV    | block | block | ...    one product; each block: loss, logits := gradient
        #   d_hidden_nD  = logits_nV weight_VD       rows of this chunk alone
        #   d_weight_VD += logits_nV^T hidden_nD     a sum over all chunks, in fp32
        for start in chunk_starts(hidden_ND, num_rows):
            rows = slice(start, start + num_rows)
            hidden_nD = hidden_ND[rows]
            logits_nV = hidden_nD @ compute_VD.T
            for first in chunk_starts(logits_nV, block_rows):
                block = slice(first, first + block_rows)
                loss += block_loss(logits_nV[block], labels_N[rows][block], wide)
            if d_hidden_ND is not None:
                # Mask ignored rows here, because rows of D elements cost less than rows of V.
                is_ignored_n1 = (labels_N[rows] == IGNORE)[:, None]
                torch.mm(logits_nV, compute_VD, out=d_hidden_ND[rows])
                d_hidden_ND[rows].masked_fill_(is_ignored_n1, 0)
                if not is_trained:
                    continue
                part_VD = logits_nV.T @ hidden_nD.masked_fill(is_ignored_n1, 0)
                d_weight_VD = part_VD.to(wide) if d_weight_VD is None else d_weight_VD.add_(part_VD)
        if needs_grad and is_trained and d_weight_VD is None:  # there was no row
            d_weight_VD = torch.zeros_like(weight_VD, dtype=wide)
        ctx.save_for_backward(d_hidden_ND, d_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        d_hidden_ND, d_weight_VD = ctx.saved_tensors
        # A 1-d factor takes part in type promotion, so it is not rounded to bf16 first.
        scaled_ND = (d_hidden_ND * grad[None]).to(d_hidden_ND.dtype)
        is_frozen = d_weight_VD is None
        scaled_VD = None if is_frozen else (d_weight_VD * grad).to(ctx.weight_dtype)
        return scaled_ND, scaled_VD, *[None] * 5


def _block_loss(logits_bV: Tensor, labels_b: Tensor, wide: torch.dtype) -> Tensor:
    """Return the sum of the block's losses; overwrite the logits with softmax - onehot.

    There are few passes over memory: log-softmax is one kernel, and exp writes its result directly
    in the logits' dtype. The entry of the label is computed in `wide`, by expm1, so that p - 1 has
    no cancellation.
    """
    is_valid_b1 = (labels_b != IGNORE)[:, None]
    target_b1 = labels_b[:, None].where(is_valid_b1, 0)
    log_p_bV = torch.log_softmax(logits_bV, 1, dtype=wide)
    at_target_b1 = log_p_bV.gather(1, target_b1)
    torch.exp(log_p_bV, out=logits_bV)
    logits_bV.scatter_(1, target_b1, at_target_b1.expm1().to(logits_bV.dtype))
    return -at_target_b1.where(is_valid_b1, 0).sum()


def _block_loss_in_cache(logits_bV: Tensor, labels_b: Tensor, wide: torch.dtype) -> Tensor:
    """Compute `_block_loss` with one exponential instead of two.

    On a CPU the exponentials dominate the time, and the passes over memory stay in the cache.
    """
    is_valid_b1 = (labels_b != IGNORE)[:, None]
    target_b1 = labels_b[:, None].where(is_valid_b1, 0)
    x_bV = logits_bV.to(wide)
    top_b1 = x_bV.amax(1, keepdim=True)
    at_target_b1 = x_bV.gather(1, target_b1) - top_b1
    p_bV = x_bV.sub_(top_b1).exp_()
    sum_b1 = p_bV.sum(1, keepdim=True)
    # softmax - onehot. A row to ignore gets its target 0 by `where`, and its gradient is set to
    # zero by the caller.
    p_bV.mul_(sum_b1.reciprocal()).scatter_add_(1, target_b1, -torch.ones_like(sum_b1))
    logits_bV.copy_(p_bV)
    return (sum_b1.log() - at_target_b1).where(is_valid_b1, 0).sum()


@functools.cache
def _compiled_block_loss() -> BlockLoss:
    """Return a `_block_loss` that torch.compile fuses.

    The logits are overwritten outside of the compiled function, because Inductor of torch 2.11
    overwrites them before their last read.
    """
    compiled = torch.compile(_loss_and_gradient, dynamic=False)

    def block_loss(logits_bV: Tensor, labels_b: Tensor, wide: torch.dtype) -> Tensor:
        loss, gradient_bV = compiled(logits_bV, labels_b, wide)
        logits_bV.copy_(gradient_bV)
        return loss

    return block_loss


def _loss_and_gradient(
    logits_bV: Tensor, labels_b: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of `_block_loss`, in operations that a compiler fuses."""
    is_valid_b1 = (labels_b != IGNORE)[:, None]
    target_b1 = labels_b[:, None].where(is_valid_b1, 0)
    x_bV = logits_bV.to(wide)
    x_bV = x_bV - x_bV.amax(1, keepdim=True)
    log_p_bV = x_bV - x_bV.exp().sum(1, keepdim=True).log()
    is_target_bV = torch.arange(x_bV.shape[1], device=x_bV.device) == target_b1
    loss = -log_p_bV.where(is_target_bV & is_valid_b1, 0).sum()
    gradient_bV = torch.where(is_target_bV, log_p_bV.expm1(), log_p_bV.exp())
    return loss, gradient_bV.to(logits_bV.dtype)
