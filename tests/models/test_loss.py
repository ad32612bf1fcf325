"""The chunked loss is cross-entropy, in value and in gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models.loss import IGNORE, token_loss_sum

ROWS, VOCABULARY, WIDTH = 23, 37, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    labels_N = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels_N[::4] = IGNORE
    return hidden_ND.requires_grad_(), weight_VD.requires_grad_(), labels_N


def reference(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(hidden_ND @ weight_VD.T, labels_N, reduction="sum", ignore_index=IGNORE)


@pytest.mark.parametrize("chunk_rows", [1, 5, 23, 100, None])
def test_equals_cross_entropy(chunk_rows: int | None) -> None:
    hidden_ND, weight_VD, labels_N = inputs()
    loss = token_loss_sum(hidden_ND, weight_VD, labels_N, chunk_rows=chunk_rows)
    expected = reference(hidden_ND, weight_VD, labels_N)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    found = torch.autograd.grad(loss / 7, (hidden_ND, weight_VD))
    wanted = torch.autograd.grad(expected / 7, (hidden_ND, weight_VD))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_all_ignored_gives_zero_loss_and_zero_gradients() -> None:
    hidden_ND, weight_VD, labels_N = inputs()
    loss = token_loss_sum(hidden_ND, weight_VD, torch.full_like(labels_N, IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    for tensor in (hidden_ND, weight_VD):
        assert tensor.grad is not None and not tensor.grad.any()


def test_same_value_without_gradients() -> None:
    hidden_ND, weight_VD, labels_N = inputs()
    with torch.no_grad():
        loss = token_loss_sum(hidden_ND, weight_VD, labels_N, chunk_rows=5)
    assert not loss.requires_grad
    assert loss == token_loss_sum(hidden_ND, weight_VD, labels_N, chunk_rows=5)


def test_only_one_input_needs_a_gradient() -> None:
    hidden_ND, weight_VD, labels_N = inputs()
    token_loss_sum(hidden_ND.detach(), weight_VD, labels_N).backward()
    expected = torch.autograd.grad(reference(hidden_ND, weight_VD, labels_N), weight_VD)[0]
    torch.testing.assert_close(weight_VD.grad, expected, rtol=1e-12, atol=1e-14)


def test_backward_twice_over_a_kept_graph() -> None:
    hidden_ND, weight_VD, labels_N = inputs()
    loss = token_loss_sum(hidden_ND, weight_VD, labels_N)
    loss.backward(torch.tensor(0.5, dtype=torch.float64), retain_graph=True)
    first = hidden_ND.grad.clone()
    loss.backward(torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(hidden_ND.grad, 2 * first)


def test_bfloat16_sums_in_float32() -> None:
    """The error is that of bf16 products, however many chunks there are."""
    hidden_ND, weight_VD, labels_N = inputs(torch.bfloat16)
    master_VD = weight_VD.detach().float().requires_grad_()
    loss = token_loss_sum(hidden_ND, master_VD, labels_N, chunk_rows=1)
    loss.backward()
    expected = reference(hidden_ND.detach().double(), weight_VD, labels_N)
    expected.backward()
    assert loss.dtype == torch.float32 and hidden_ND.grad.dtype == torch.bfloat16
    assert master_VD.grad.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=5e-3, atol=0.0)
    error = (master_VD.grad.double() - weight_VD.grad).norm() / weight_VD.grad.norm()
    assert error < 5e-3


def test_large_logits_stay_finite() -> None:
    hidden_ND, weight_VD, labels_N = inputs(torch.float32)
    scaled_VD = (weight_VD.detach() * 1e4).float().requires_grad_()
    loss = token_loss_sum(hidden_ND, scaled_VD, labels_N)
    loss.backward()
    assert bool(loss.isfinite()) and bool(scaled_VD.grad.isfinite().all())


def test_the_incoming_gradient_is_not_rounded() -> None:
    """A loss divided by a number of tokens that bf16 cannot hold keeps its gradient's size."""
    hidden_ND, weight_VD, labels_N = inputs(torch.bfloat16)
    factor = 1.25 + 2**-9 + 2**-10  # bf16 rounds it to 1.25
    grads = [
        torch.autograd.grad(token_loss_sum(hidden_ND, weight_VD, labels_N) * scale, hidden_ND)[0]
        for scale in (1.0, factor)
    ]
    ratio = float(grads[1].double().abs().sum() / grads[0].double().abs().sum())
    assert ratio == pytest.approx(factor, rel=8e-4)
