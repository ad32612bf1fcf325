"""The cut of a chain of layers against all cuts there are."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.errors import StrategyError
from phalanx.models.registry import shape_of
from phalanx.parallel.pipeline.cut import cut_chain, cut_of
from phalanx.parallel.pipeline.links import cut_links, links_of
from phalanx.parallel.pipeline.partition import imbalance, partition, stage_costs
from phalanx.strategy import Strategy


def all_cuts(num_layers: int, num_stages: int) -> list[list[range]]:
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [
        [range(*pair) for pair in itertools.pairwise((0, *inner, num_layers))] for inner in cuts
    ]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_it_is_the_best_of_all(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = partition(costs, num_stages)
    assert [layer for layers in stages for layer in layers] == [*range(len(costs))]
    assert len(stages) == num_stages
    assert all(stages)

    def value(cut: list[range]) -> tuple[float, float]:
        of_stages = stage_costs(costs, cut)
        return max(of_stages), sum(cost**2 for cost in of_stages)

    assert value(stages) == min(map(value, all_cuts(len(costs), num_stages)))


def test_a_heavy_embedding_and_a_block_of_threefold_cost() -> None:
    costs = [4.0, 1, 1, 3, 1, 1, 1, 2]
    stages = partition(costs, 4)
    assert stages == [range(1), range(1, 3), range(3, 5), range(5, 8)]
    even = [range(at, at + 2) for at in range(0, 8, 2)]
    assert imbalance(costs, stages) < imbalance(costs, even)
    assert imbalance(costs, stages) >= 1


def test_each_stage_has_a_layer() -> None:
    costs = [1.0] * 6
    assert partition(costs, 2) == [range(3), range(3, 6)]
    with pytest.raises(StrategyError, match="7 stages, but the model is a chain of 6 layers"):
        partition(costs, 7)


def test_more_stages_than_layers_name_the_strategy_and_the_layers() -> None:
    shape = dataclasses.replace(shape_of("demo"), num_layers=2)
    words = "pp4:interleaved/2 makes 8 stages, but the model is a chain of 4 layers: embedding, 2"
    with pytest.raises(StrategyError, match=words):
        cut_of(Strategy.parse("pp4:interleaved/2"), shape)


def test_a_single_layer_cannot_be_cut() -> None:
    words = "pp2 makes 2 stages, but the model is a single layer, which cannot be cut; use dp or f"
    with pytest.raises(StrategyError, match=words):
        cut_chain(Strategy.parse("pp2"), [1.0], "")


@pytest.mark.parametrize(
    "order, costs, sizes",
    [
        ("abcd", [1, 1, 1, 1], [2, 2]),
        ("abbc", [1, 1, 1, 9], [3, 1]),
        ("abbc", [9, 1, 1, 1], [1, 3]),
        ("abacd", [1, 9, 1, 1, 1], [3, 2]),
        ("abab", [1, 1, 1, 1], [2, 2]),  # refused later: no cut has each in one stage
    ],
)
def test_layers_of_one_parameter_stay_in_one_stage(
    order: str, costs: list[float], sizes: list[int]
) -> None:
    of = {name: nn.Linear(3, 3) for name in order}
    model = nn.Sequential(*(of[name] for name in order))
    cut = cut_links(Strategy.parse("pp2"), model, [[str(n)] for n in range(len(order))], costs)
    assert [len(stage) for stage in cut] == sizes


def test_one_parameter_may_tie_the_ends() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    links = links_of(model)
    assert [len(s) for s in cut_links(Strategy.parse("pp2"), model, links, [4, 1, 2])] == [1, 2]
    model[2].weight = model[0].weight
    assert [len(s) for s in cut_links(Strategy.parse("pp2"), model, links, [4, 1, 2])] == [1, 2]
