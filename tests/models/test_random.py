"""Random numbers depend on their position alone, and are random."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.models.random import bits, dropout, fill_normal, key, layer_keys, row_keys, uniform

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """Return the output function as its paper prints it, on Python's integers."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_bits_are_splitmix64() -> None:
    # The first outputs for seed 0 of the reference implementation (Vigna, splitmix64.c).
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    found = bits(0, torch.arange(1, 4))
    assert [number & MASK for number in found.tolist()] == published


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_bits_on_any_key_and_index(stream: int, index: int) -> None:
    expected = splitmix64(stream + index * 0x9E3779B97F4A7C15)
    assert int(bits(stream, torch.tensor([index]))) & MASK == expected


def test_key_tells_its_parts_apart() -> None:
    keys = [key("ab", "c"), key("a", "bc"), key("abc"), key(1), key("1"), key(1, 2), key(12), key()]
    assert len(set(keys)) == len(keys)
    assert key(0, "embedding.weight") == 7964902466116216439  # streams may never change


def test_uniform_is_open_and_even() -> None:
    numbers = uniform(key("uniform"), torch.arange(1 << 16))
    assert numbers.dtype == torch.float64
    assert 0 < numbers.min() and numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=64, min=0, max=1)
    chi_square = float(((counts - 1024) ** 2 / 1024).sum())
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)


@given(st.data())
def test_any_part_of_a_tensor_is_drawn_alone(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    start = [data.draw(st.integers(0, size - 1)) for size in shape]
    stop = [data.draw(st.integers(low, size)) for low, size in zip(start, shape, strict=True)]
    whole = fill_normal(torch.empty(shape), 5, 0.02)
    part = torch.empty([high - low for low, high in zip(start, stop, strict=True)])
    fill_normal(part, 5, 0.02, shape=shape, offset=start)
    slices = tuple(slice(low, high) for low, high in zip(start, stop, strict=True))
    assert torch.equal(part, whole[slices])


def test_parts_larger_than_a_block() -> None:
    whole = fill_normal(torch.empty(70, 1001), 5, 1.0)
    part = fill_normal(torch.empty(61, 700), 5, 1.0, shape=(70, 1001), offset=(9, 301))
    assert torch.equal(part, whole[9:, 301:])


def test_normal_has_its_moments_and_one_value_in_every_dtype() -> None:
    numbers = fill_normal(torch.empty(1 << 18), 7, 0.02)
    assert abs(float(numbers.mean())) < 5 * 0.02 / 512
    assert float(numbers.std()) == pytest.approx(0.02, rel=0.01)
    standard = numbers / numbers.std()
    assert float((standard**4).mean()) == pytest.approx(3, abs=0.05)
    assert float((standard.abs() > 3).float().mean()) == pytest.approx(0.0027, abs=0.0005)
    for dtype in (torch.float64, torch.bfloat16):
        cast = fill_normal(torch.empty(1 << 18, dtype=dtype), 7, 0.02)
        assert torch.equal(cast, numbers.to(dtype))


def kept(keys_B: torch.Tensor, salt: int, shape: tuple[int, int], p: float) -> torch.Tensor:
    x_BTD = torch.ones(len(keys_B), *shape, dtype=torch.float64)
    return dropout(x_BTD, p, keys_B, salt)


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    for p in (0.1, 0.5, 0.9):
        y_BTD = kept(row_keys(0, 0, torch.arange(16)), 1, (64, 256), p)
        share = float((y_BTD == 0).double().mean())
        assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / y_BTD.numel()))
        assert float(y_BTD.max()) == pytest.approx(1 / (1 - p), rel=1e-4)
    x_BTD = torch.randn(2, 3, 5)
    assert dropout(x_BTD, 0.0, row_keys(0, 0, torch.arange(2)), 1) is x_BTD


def test_dropout_does_not_know_the_batch() -> None:
    keys_B = row_keys(3, 11, torch.arange(8))
    whole = kept(keys_B, 2, (16, 31), 0.3)
    for rows in ([5], [0, 3], [7, 6, 5]):
        assert torch.equal(kept(row_keys(3, 11, torch.tensor(rows)), 2, (16, 31), 0.3), whole[rows])
    later = dropout(
        torch.ones(8, 6, 31, dtype=torch.float64), 0.3, keys_B, 2, positions_T=torch.arange(10, 16)
    )
    assert torch.equal(later, whole[:, 10:])


@pytest.mark.parametrize("first", [*range(9), 12, 27])
def test_any_part_of_a_mask_is_drawn_alone(first: int) -> None:
    """One draw serves four features: a part may begin and end within one."""
    keys_B = row_keys(3, 11, torch.arange(6))
    whole = kept(keys_B, 2, (16, 31), 0.3)
    for width in (1, 2, 3, 4, 7, 8, 31):
        size = min(width, 31 - first)
        part = dropout(
            torch.ones(2, 5, size, dtype=torch.float64),
            0.3,
            keys_B[3:5],
            2,
            positions_T=torch.arange(9, 14),
            first_feature=first,
        )
        assert torch.equal(part, whole[3:5, 9:14, first : first + size])


def test_dropout_masks_are_independent() -> None:
    """Masks that differ in one of seed, step, row, salt, place or feature do not correlate."""
    shape, rows = (64, 64), torch.arange(8)
    base = kept(row_keys(0, 0, rows), 1, shape, 0.5) > 0
    others = {
        "seed": kept(row_keys(1, 0, rows), 1, shape, 0.5) > 0,
        "step": kept(row_keys(0, 1, rows), 1, shape, 0.5) > 0,
        "row": kept(row_keys(0, 0, rows + 1), 1, shape, 0.5) > 0,
        "layer": kept(layer_keys(row_keys(0, 0, rows), 0), 1, shape, 0.5) > 0,
        "salt": kept(row_keys(0, 0, rows), 2, shape, 0.5) > 0,
        "place": base.roll(1, 1),
        **{f"feature {shift}": base.roll(shift, 2) for shift in (1, 2, 3, 4, 5)},
    }
    for what, other in others.items():
        agreement = float((base == other).double().mean())
        assert agreement == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(base.numel())), what


def test_layers_draw_apart() -> None:
    keys_B = row_keys(0, 0, torch.arange(8))
    masks = [
        kept(layer_keys(keys_B, layer), salt, (64, 64), 0.5) > 0
        for layer in (0, 1)
        for salt in (1, 2)
    ]
    masks.append(kept(keys_B, 0, (64, 64), 0.5) > 0)
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            agreement = float((mask == other).double().mean())
            assert agreement == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(mask.numel()))
