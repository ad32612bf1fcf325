"""Operators as operations: what each multiplies, reads and writes."""

from __future__ import annotations

import pytest
import torch

from phalanx.account.recorder import operation_of


def test_a_product_into_given_memory_is_the_same_operation() -> None:
    x, w = (torch.empty(size, device="meta") for size in ((256, 64), (64, 128)))
    made = torch.mm(x, w)
    first = operation_of(torch.ops.aten.mm.default, (x, w), {}, made)
    second = operation_of(torch.ops.aten.mm.out, (x, w), {"out": made}, made)
    assert first is not None
    assert first == second
    assert first.num_bytes == 4 * (256 * 64 + 64 * 128 + 256 * 128)
    assert first.flops == 2 * 256 * 64 * 128 and first.product == (256, 128, 64)


@pytest.mark.parametrize(("num_groups", "num_keys"), [(4, 30), (4, 100), (2, 100)])
@pytest.mark.parametrize("kernel", ["flash_attention", "flash_attention_for_cpu"])
def test_attention_counts_each_query_with_each_key(
    kernel: str, num_groups: int, num_keys: int
) -> None:
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{direction}").default
        for direction in ("", "_backward")
    )
    q = torch.empty(2, 4, 100, 16, device="meta")
    k, v = (torch.empty(2, num_groups, num_keys, 16, device="meta") for _ in range(2))
    found = operation_of(forward, (q, k, v), {}, (torch.empty_like(q), q[..., 0]))
    assert found is not None and found.scores == 2 * 4 * 100 * num_keys
    assert found.flops == 4 * 16 * found.scores
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    back = operation_of(backward, (torch.empty_like(q), q, k, v), {}, grads)
    assert back is not None and back.scores == found.scores
    assert back.flops == 10 * 16 * found.scores
