"""Operators as operations: what each multiplies, reads and writes."""

from __future__ import annotations

import torch

from phalanx.account.work import operation_of


def test_a_product_into_given_memory_is_the_same_operation() -> None:
    x, w = (torch.empty(size, device="meta") for size in ((256, 64), (64, 128)))
    made = torch.mm(x, w)
    first = operation_of(torch.ops.aten.mm.default, (x, w), {}, made)
    second = operation_of(torch.ops.aten.mm.out, (x, w), {"out": made}, made)
    assert first is not None
    assert first == second
    assert first.num_bytes == 4 * (256 * 64 + 64 * 128 + 256 * 128)
    assert first.flops == 2 * 256 * 64 * 128 and first.product == (256, 128, 64)
