"""Figures of the load of experts, from counts."""

from __future__ import annotations

import pytest

from phalanx.measure.expert_load import Routing


def routing(num_ranks: int = 2, dropped: float = 2.0) -> Routing:
    counts = [[4, 2, 2, 0], [2, 2, 2, 2]]
    found = Routing.of([1, 2], counts, [dropped, 0.0], num_ranks, (0.25, 0.5))
    assert found is not None
    return found


def test_the_figures_of_two_layers() -> None:
    found = routing()
    # 1/2, 1/4, 1/4: 1.5 bits of 2
    assert found.entropy == pytest.approx([0.75, 1.0])
    assert found.expert_load == [2.0, 1.0]
    assert found.rank_load == [1.5, 1.0], "ranks have experts 0 1 and 2 3"
    assert found.dropped == [0.25, 0.0]
    assert found.means()["rank_load"] == 1.25 and found.means()["dropped"] == 0.125


def test_texts_name_the_busiest_and_the_least_even() -> None:
    assert routing().brief() == "busiest rank 1.25x, 12.5 % dropped"
    assert routing(num_ranks=1, dropped=0).brief() == "busiest expert 1.50x"
    text = routing().text()
    assert text == (
        "entropy 0.875 (1 is even; layer 1: 0.750), busiest expert 1.50x the mean, rank 1.25x, "
        "12.5 % dropped, balancing loss 0.25, z loss 0.5"
    )


def test_a_batch_without_tokens_has_no_routing() -> None:
    assert Routing.of([0], [[0, 0]], [0.0], 1, (0.0, 0.0)) is None
    one = Routing.of([0], [[3]], [0.0], 1, (0.0, 0.0))
    assert one is not None and one.entropy == [1.0]
