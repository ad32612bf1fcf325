"""The functions written for a CPU equal PyTorch's own, over several blocks and a last short one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from marks import by_hand
from phalanx.measure.memory import MemoryLedger
from phalanx.models import attention, cpu
from phalanx.models.attention import documents_of
from phalanx.models.layers import Norm
from phalanx.models.registry import shape_of

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
@pytest.mark.parametrize("documents", [None, "one for all rows", "each row its own"])
def test_causal_attention(length: int, documents: str | None) -> None:
    q, k, v = (normal(2, length, 3, 8, seed=seed) for seed in range(3))
    starts_BT1, bias = None, None
    if documents is not None:
        documents_BT = torch.randint(0, 3, (2, length)).sort().values
        documents_BT[:, -1] = 7
        found = documents_of(documents_BT[: 1 if documents.startswith("one") else 2])
        if found is not None:  # of one token there is one document
            starts_BT1, _, _ = found
            bias = dense_bias(documents_BT[: len(starts_BT1)])
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias, is_causal=bias is None
    )
    assert_same(cpu.causal_attention(q, k, v, starts_BT1), expected.transpose(1, 2), (q, k, v))


def dense_bias(documents_BT: Tensor, window: int | None = None) -> Tensor:
    """Return what to add to the scores, [B, 1, T, T]: the definition, without any cleverness."""
    sees_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
    if window is not None:
        sees_BTT = sees_BTT.triu(1 - window)
    return torch.zeros(sees_BTT.shape, dtype=torch.float64).masked_fill(~sees_BTT, -math.inf)[
        :, None
    ]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_documents_attend_as_under_a_dense_mask(dtype: torch.dtype, kv_heads: int) -> None:
    """Documents of 1 token, of a block's, and longer ones that begin and end inside blocks."""
    length = 700
    q, k, v = (normal(2, length, heads, 8, seed=heads).to(dtype) for heads in (4, kv_heads, 5))
    v = v[:, :, :kv_heads]
    borders = [[0, 1, 256, 600], [0, 300, 301, 302]]
    documents_BT = torch.stack(
        [(torch.arange(length)[:, None] >= torch.tensor(b)).sum(1) for b in borders]
    )
    found = attention.attend(q, k, v, documents_of(documents_BT))
    expected = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)),
        attn_mask=dense_bias(documents_BT),
        enable_gqa=True,
    ).transpose(1, 2)
    error = (found.double() - expected).detach().abs().max()
    assert float(error) < (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [1, 256, 300, 700, *map(by_hand, [7, 699, 5000])])
def test_windows_attend_as_under_a_dense_mask(window: int, has_documents: bool) -> None:
    q, k, v = (normal(2, 700, heads, 8, seed=heads) for heads in (4, 2, 2))
    documents_BT = torch.zeros(2, 700, dtype=torch.int64)
    if has_documents:
        documents_BT[1, 300:] = 1
    found = attention.attend(q, k, v, documents_of(documents_BT), window)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=dense_bias(documents_BT, window),
        enable_gqa=True,
    ).transpose(1, 2)
    assert_same(found, expected, (q, k, v))


def test_documents_are_found_on_the_host() -> None:
    documents_BT = torch.tensor([[3, 3, 5, 5, 5, 9], [0, 0, 0, 0, 0, 0]])
    found = documents_of(documents_BT)
    assert found is not None
    starts_BT1, ends_BN1, longest = found
    assert starts_BT1[..., 0].tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6]
    assert ends_BN1[..., 0].tolist() == [[2, 5, 6], [6, 6, 6]]
    assert longest == 6
    assert documents_of(documents_BT[1:]) is None and documents_of(None) is None
    short = documents_of(torch.arange(12)[None] // 3)
    assert short is not None and short[2] == 4  # 3 tokens, rounded up


def test_the_sequences_that_flash_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of the GPU's kernel, whose place PyTorch's own attention takes, sequence by one."""

    def one_by_one(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        before, after = how["window_size"]
        assert after == 0 and how["enable_gqa"]
        assert how["cu_seq_q"].dtype == torch.int32 and how["cu_seq_q"] is how["cu_seq_k"]
        borders = how["cu_seq_q"].tolist()
        assert borders[0] == 0 and borders[-1] == len(q)
        pieces = []
        for start, stop in itertools.pairwise(borders):
            assert 0 <= stop - start <= how["max_q"] == how["max_k"]
            row = [x[start:stop].transpose(0, 1) for x in (q, k, v)]
            bias = dense_bias(torch.zeros(1, stop - start), None if before == -1 else before + 1)
            one = F.scaled_dot_product_attention(*row, attn_mask=bias[0], enable_gqa=True)
            pieces.append(one.transpose(0, 1))
        return torch.cat([piece for piece in pieces if len(piece)])

    q, k, v = (normal(3, 40, heads, 8, seed=heads).detach() for heads in (4, 2, 2))
    documents_BT = torch.randint(0, 4, (3, 40)).sort().values
    documents_BT[2] = 0
    documents = documents_of(documents_BT)
    cases = [(documents, None), (documents, 6), (None, 6), (None, 1)]
    expected = [attention.attend(q, k, v, *case) for case in cases]
    monkeypatch.setattr(attention, "runs_flash", lambda q: True)
    monkeypatch.setattr(attention, "varlen_attn", one_by_one)
    found = [attention.attend(q, k, v, *case) for case in cases]
    torch.testing.assert_close(found, expected, **NEAR)


def test_long_rows_of_documents_need_no_square() -> None:
    """8k tokens: a mask of T x T would be 64 MiB of booleans, or 128 in bf16, a row."""
    length = 1 << 13
    q, k, v = (torch.randn(1, length, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    documents = documents_of((torch.arange(length) // 1000)[None])
    q.requires_grad_()
    with MemoryLedger(torch.nn.Identity(), torch.optim.SGD([torch.ones(1)]), "cpu") as ledger:
        attention.attend(q, k, v, documents).sum().backward()
    assert ledger.account().peak_bytes < 100 * q.nbytes


@pytest.mark.parametrize("dtype", [by_hand(torch.float64), torch.bfloat16])
def test_a_compiled_block_holds_attention_of_documents(dtype: torch.dtype) -> None:
    q, k, v = (normal(2, 30, heads, 8, seed=heads).detach().to(dtype) for heads in (4, 2, 2))
    q.requires_grad_()
    compiled = torch.compile(attention.attend, backend="aot_eager", fullgraph=True)
    for number in (2, 3, 7):
        documents = documents_of((torch.arange(30) // number).expand(2, 30))
        window = 4 if number == 7 else None
        results = [
            function(q, k, v, documents, window) for function in (attention.attend, compiled)
        ]
        grads = [torch.autograd.grad(result.sum(), q)[0] for result in results]
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(grads[1], grads[0])


def test_bfloat16_attention_is_as_near_as_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads: no more than twice the error of SDPA in bf16."""
    q, k, v = (normal(2, 300, heads, 16, seed=heads) for heads in (4, 2, 2))
    exact = attention.attend(q, k, v)
    grad = torch.randn_like(exact)
    exact_grads = torch.autograd.grad(exact, (q, k, v), grad)

    def errors() -> Tensor:
        low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        out = attention.attend(*low)
        grads = torch.autograd.grad(out, low, grad.bfloat16())
        pairs = zip((out, *grads), (exact, *exact_grads), strict=True)
        return torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs]).detach()

    ours = errors()
    monkeypatch.setattr(cpu, "attends_by_blocks", lambda x: False)
    assert bool((ours < 2 * errors()).all()) and bool((ours < 0.02).all())


def test_not_preferred_off_the_cpu_or_under_the_compiler() -> None:
    assert cpu.is_preferred(torch.empty(1))
    assert not cpu.is_preferred(torch.empty(1, device="meta"))


def test_few_served_tokens_run_pytorchs_functions_with_the_same_result() -> None:
    few, many = torch.empty(1, 1024), torch.empty(65, 1024)
    x, weight, angle = torch.randn(1, 3, 2, 8), torch.randn(8), torch.randn(1, 3, 1, 4)
    layer = Norm(8, shape_of("demo"))
    layer.weight.data = weight

    def found() -> tuple[Tensor, Tensor]:
        return layer(x), attention.rotate(x, angle.cos(), angle.sin())

    trained = found()
    with torch.inference_mode():
        assert not cpu.is_preferred(few) and cpu.is_preferred(many)
        torch.testing.assert_close(found(), tuple(each.detach() for each in trained))
    with torch.no_grad():
        assert cpu.is_preferred(few)
