"""The chunked loss is cross-entropy, in value and in gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models import loss as loss_module
from phalanx.models.loss import IGNORE, BlockLoss, chunk_rows, token_loss_sum

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


@pytest.mark.parametrize("num_rows", [1, 5, 23, 100, None])
def test_equals_cross_entropy(num_rows: int | None) -> None:
    hidden_ND, weight_VD, labels_N = inputs()
    loss = token_loss_sum(hidden_ND, weight_VD, labels_N, num_rows=num_rows)
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
        loss = token_loss_sum(hidden_ND, weight_VD, labels_N, num_rows=5)
    assert not loss.requires_grad
    assert loss == token_loss_sum(hidden_ND, weight_VD, labels_N, num_rows=5)


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
    loss = token_loss_sum(hidden_ND, master_VD, labels_N, num_rows=1)
    loss.backward()
    expected = reference(hidden_ND.detach().double(), weight_VD, labels_N)
    expected.backward()
    assert loss.dtype == torch.float32 and hidden_ND.grad.dtype == torch.bfloat16
    assert master_VD.grad.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=5e-3, atol=0.0)
    error = (master_VD.grad.double() - weight_VD.grad).norm() / weight_VD.grad.norm()
    assert error < 5e-3


def test_the_weights_gradient_is_summed_in_float32() -> None:
    """A thousand equal terms: a sum in bf16 would stand still at 256 of them."""
    num_rows = 1000
    hidden_ND = torch.ones(num_rows, 4, dtype=torch.bfloat16)
    weight_VD = torch.zeros(8, 4, requires_grad=True)
    labels_N = torch.zeros(num_rows, dtype=torch.int64)
    token_loss_sum(hidden_ND, weight_VD, labels_N, num_rows=1).backward()
    once = torch.autograd.grad(token_loss_sum(hidden_ND[:1], weight_VD, labels_N[:1]), weight_VD)
    torch.testing.assert_close(weight_VD.grad, num_rows * once[0], rtol=1e-6, atol=0.0)


def test_a_chunk_has_the_rows_that_its_device_holds() -> None:
    llama, bf16 = 128_256, torch.bfloat16
    assert chunk_rows(llama, bf16, "cpu") == 1024
    assert chunk_rows(8192, bf16, "cpu") == 1024
    assert chunk_rows(67, torch.float64, "cpu") == (1 << 23) // 67
    assert chunk_rows(llama, torch.float64, "cpu") * llama * 8 <= 1 << 29
    assert 2048 <= chunk_rows(llama, bf16, "cuda") == 4185
    assert 2048 <= chunk_rows(151_936, bf16, "cuda")
    assert chunk_rows(1 << 31, bf16, "cuda") == 1


def in_place(logits_bV: Tensor, labels_b: Tensor, wide: torch.dtype) -> Tensor:
    """Do what the compiled loss does, without a compiler."""
    loss, gradient_bV = loss_module._loss_and_gradient(logits_bV, labels_b, wide)
    logits_bV.copy_(gradient_bV)
    return loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_gpu", [loss_module._block_loss, in_place])
def test_the_ways_to_make_a_block_agree(of_gpu: BlockLoss, dtype: torch.dtype) -> None:
    """What a GPU runs is held against what a CPU runs, here on a CPU."""
    generator = torch.Generator().manual_seed(1)
    logits_bV = (8 * torch.randn(7, 50, generator=generator)).to(dtype)
    labels_b = torch.randint(0, 50, (7,), generator=generator)
    logits_bV[1, int(labels_b[1])] = 60.0  # p is 1 to the last bit, and the loss almost 0
    labels_b[3] = IGNORE
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = [logits_bV.clone(), logits_bV.clone()]
    losses = [
        function(block, labels_b, wide)
        for function, block in zip((of_gpu, loss_module._block_loss_in_cache), blocks, strict=True)
    ]
    torch.testing.assert_close(losses[0], losses[1])
    is_valid_b = labels_b != IGNORE
    torch.testing.assert_close(blocks[0][is_valid_b], blocks[1][is_valid_b])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch warns of itself while it compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_changes_nothing(dtype: torch.dtype) -> None:
    """What Triton fuses on a GPU, fused by Inductor's other backend."""
    generator = torch.Generator().manual_seed(1)
    blocks = [(8 * torch.randn(10, 53, generator=generator)).to(dtype)] * 2
    blocks = [block.clone() for block in blocks]
    labels_b = torch.randint(0, 53, (10,), generator=generator)
    labels_b[3] = IGNORE
    ways = loss_module._compiled_block_loss(), loss_module._block_loss
    losses = [way(block, labels_b, torch.float32) for way, block in zip(ways, blocks, strict=True)]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(blocks[0], blocks[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_compiled_loss_is_the_loss_on_a_gpu() -> None:
    hidden_ND, weight_VD, labels_N = (x.detach().cuda() for x in inputs(torch.float32))
    found: list[Tensor] = []
    for compiles in (False, True):
        factors = hidden_ND.clone().requires_grad_(), weight_VD.float().requires_grad_()
        loss = token_loss_sum(*factors, labels_N, num_rows=9, compiles=compiles)
        found += [loss, *torch.autograd.grad(loss, factors)]
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, theirs)


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
