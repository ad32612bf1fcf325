"""The order: a bijection found at once, whose state is a position."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.order import Order, pattern_of, permute


@given(n=st.integers(1, 3000), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))


@given(n=st.integers(1, 1 << 40), data=st.data())
def test_places_are_independent_of_each_other(n: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5)))
    together = permute(places, n, 3, 1)
    alone = [int(permute(np.array([place]), n, 3, 1)[0]) for place in places]
    assert together.tolist() == alone
    assert all(0 <= sample < n for sample in alone)


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(permute(np.arange(50), 50, seed, e)) for seed in range(10) for e in range(10)}
    assert len(orders) == 100


def test_every_order_of_four_is_about_as_common() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        key = tuple(permute(np.arange(4), 4, seed, 0).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 50  # chi-square, 23 d.o.f.


def test_order_looks_shuffled() -> None:
    n = 5000
    order = permute(np.arange(n), n, 0, 0)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / n**0.5
    assert (np.abs(np.diff(order)) == 1).sum() < 12  # 2 expected
    assert (order == np.arange(n)).sum() < 8  # 1 expected
    low_bits = np.corrcoef(order % 2, np.arange(n) % 2)[0, 1]
    assert abs(low_bits) < 5 / n**0.5


def test_late_positions_cost_no_more_than_early_ones() -> None:
    began = time.process_time()
    order = Order(10**9, seed=1)
    samples = order.samples(np.arange(10**15, 10**15 + 256))
    assert len(set(samples.tolist())) == 256
    assert time.process_time() - began < 1.0


def test_stream_is_the_epochs_one_after_the_other() -> None:
    order = Order(7, seed=5)
    stream = order.samples(np.arange(21))
    for epoch in range(3):
        part = stream[7 * epoch : 7 * epoch + 7]
        assert part.tolist() == permute(np.arange(7), 7, 5, epoch).tolist()
    plain = Order(7, is_shuffled=False).samples(np.arange(5, 10))
    assert plain.tolist() == [5, 6, 0, 1, 2]


@given(weights=st.lists(st.integers(1, 40), min_size=2, max_size=7))
def test_a_mixture_is_within_a_sample_of_its_shares_in_every_prefix(weights: list[int]) -> None:
    period = sum(weights)
    source, nth = pattern_of(tuple(weights))
    for number, weight in enumerate(weights):
        mine = source == number
        taken = np.cumsum(mine)  # of the first 1, 2, ... positions
        assert (np.abs(taken * period - np.arange(1, period + 1) * weight) < period).all()
        assert taken[-1] == weight and nth[mine].tolist() == list(range(weight))


@pytest.mark.parametrize(
    "weights",
    [
        (7, 3),
        pytest.param((50, 25, 20, 5), marks=pytest.mark.slow),
        pytest.param((333_333, 333_333, 333_334), marks=pytest.mark.slow),
        pytest.param((999_999, 1), marks=pytest.mark.slow),
        pytest.param((1,) * 64, marks=pytest.mark.slow),
    ],
)
def test_shares_are_exact_over_a_million_samples(weights: tuple[int, ...]) -> None:
    sizes = [1000 + 77 * number for number in range(len(weights))]
    order = Order(sum(sizes), seed=3).mixed(sizes, weights)
    samples = order.samples(np.arange(10**6))
    source = np.searchsorted(np.cumsum(sizes), samples, side="right")
    counts = np.bincount(source, minlength=len(weights))
    assert counts.tolist() == [10**6 * weight // sum(weights) for weight in weights]


def test_a_source_of_a_mixture_is_read_in_its_own_order_epoch_after_epoch() -> None:
    order = Order(30, seed=5).mixed([20, 10], [1, 3])
    samples = order.samples(np.arange(1000))
    parts = [samples[samples < 20], samples[samples >= 20] - 20]
    for part, size in zip(parts, (20, 10), strict=True):
        assert part.tolist() == Order(size, seed=5).samples(np.arange(len(part))).tolist()
    late = np.arange(10**12, 10**12 + 50)
    assert order.samples(late).tolist() == [
        int(order.samples(late[i : i + 1])[0]) for i in range(50)
    ]
