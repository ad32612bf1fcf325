"""Norms in pieces: as exact as 64 bits, the same bits as piece by piece."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx.comm.reductions import _PIECE, power_sum


def piece_by_piece(shards: list[Tensor], p: float) -> float:
    """Return what a norm of each piece gives, in the order of the pieces, by data type."""
    norms = [torch.linalg.vector_norm(x, p) for each in shards for x in each.split(_PIECE)]
    powers = torch.stack(norms).double()
    return float(powers.max() if math.isinf(p) else powers.pow(p).sum())


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_the_pieces_of_large_and_small_tensors_have_the_bits_of_each_alone(p: float) -> None:
    torch.manual_seed(0)
    sizes = [1, _PIECE - 1, _PIECE, _PIECE + 1, 5 * _PIECE, 0, 3 * _PIECE + 77, 300]
    shards = [torch.randn(size) * 10.0 ** (number - 3) for number, size in enumerate(sizes)]
    expected = piece_by_piece([each for each in shards if len(each)], p)
    assert float(power_sum(shards, p)) == expected


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 2e-7), (torch.bfloat16, 2e-5)])
def test_a_large_tensor_is_as_exact_as_in_64_bits(dtype: torch.dtype, rel: float) -> None:
    torch.manual_seed(1)
    large = torch.randn(2048, 2048).to(dtype)
    exact = float(large.double().square().sum())
    assert float(power_sum([large], 2.0)) == pytest.approx(exact, rel=rel)


def test_nothing_has_no_norm_and_an_infinite_element_an_infinite_one() -> None:
    assert float(power_sum([torch.empty(0)], 2.0)) == 0
    assert float(power_sum([torch.ones(3), torch.tensor([math.inf])], 2.0)) == math.inf
    assert math.isnan(float(power_sum([torch.ones(3), torch.tensor([math.nan])], math.inf)))
