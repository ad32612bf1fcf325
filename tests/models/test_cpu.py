"""The functions written for a CPU equal PyTorch's own, over several blocks and a last short one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models import attention, cpu

NEAR = {"rtol": 1e-11, "atol": 1e-12}


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Compare two results, and their gradients for one arbitrary gradient of the result."""
    torch.testing.assert_close(found, expected, **NEAR)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        **NEAR,
    )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(cpu, "_QUERY_BLOCK", 5)


@pytest.mark.usefixtures("small_blocks")
def test_rms_norm() -> None:
    x, weight = normal(3, 7, 24, seed=0), normal(24, seed=1)
    assert_same(cpu.rms_norm(x, weight, 1e-3), F.rms_norm(x, (24,), weight, 1e-3), (x, weight))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_tables", [1, 2])
def test_rotation(num_tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_BTHK = normal(2, 13, 3, 8, seed=0)
    angle = normal(num_tables, 13, 1, 4, seed=1).detach()
    found = attention.rotate(x_BTHK, angle.cos(), angle.sin())
    left, right = x_BTHK.chunk(2, dim=-1)
    turned = torch.view_as_complex(torch.stack((left, right), -1)) * torch.exp(1j * angle)
    assert_same(found, torch.cat((turned.real, turned.imag), -1), (x_BTHK,))
    monkeypatch.setattr(cpu, "is_preferred", lambda x: False)
    elsewhere = attention.rotate(x_BTHK, angle.cos(), angle.sin())
    torch.testing.assert_close(elsewhere, found, **NEAR)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("length", [1, 5, 13])
@pytest.mark.parametrize("documents", [None, "one mask", "a mask a row"])
def test_causal_attention(length: int, documents: str | None) -> None:
    q, k, v = (normal(2, length, 3, 8, seed=seed) for seed in range(3))
    bias = None
    if documents is not None:
        num_biases = 1 if documents == "one mask" else 2
        documents_BT = torch.randint(0, 3, (num_biases, length)).sort().values
        documents_BT[:, -1] = 7
        bias = attention.document_bias(documents_BT, torch.float64)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias, is_causal=bias is None
    )
    assert_same(cpu.causal_attention(q, k, v, bias), expected.transpose(1, 2), (q, k, v))


def test_bfloat16_attention_is_as_near_as_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, two documents: no more than twice the error of SDPA in bf16."""
    q, k, v = (normal(2, 300, heads, 16, seed=heads) for heads in (4, 2, 2))
    documents_BT = (torch.arange(300) > 99).long().expand(2, 300)
    bias = attention.document_bias(documents_BT, torch.float64)
    assert bias is not None
    exact = attention.attend(q, k, v, bias)
    grad = torch.randn_like(exact)
    exact_grads = torch.autograd.grad(exact, (q, k, v), grad)

    def errors() -> Tensor:
        low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        out = attention.attend(*low, bias.bfloat16())
        grads = torch.autograd.grad(out, low, grad.bfloat16())
        pairs = zip((out, *grads), (exact, *exact_grads), strict=True)
        return torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs]).detach()

    ours = errors()
    monkeypatch.setattr(cpu, "is_preferred", lambda x: False)
    assert bool((ours < 2 * errors()).all()) and bool((ours < 0.02).all())


def test_not_preferred_off_the_cpu_or_under_the_compiler() -> None:
    assert cpu.is_preferred(torch.empty(1))
    assert not cpu.is_preferred(torch.empty(1, device="meta"))
