"""Where to cut a chain of layers, so that the slowest stage is as fast as it can be; no torch.

A pipeline is as fast as its slowest stage. The optimum is exact: the best cut of the first n layers
into s stages is the best cut of the first k into s - 1, and layers k to n as the last, for the best
k (the linear partition problem; Skiena, The Algorithm Design Manual, section 10.7).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, combinations

from phalanx.errors import StrategyError


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """Return the layers of each stage, in order; every stage has at least one.

    Of the cuts whose slowest stage is equally fast, it is the most even: it has the least sum of
    squares.

    Args:
        costs: forward and backward of each layer, in FLOPs or seconds, at least 0.
        num_stages: at least 1.

    Raises:
        StrategyError: there are fewer layers than stages.
    """
    num_layers = len(costs)
    if num_stages > num_layers:
        raise StrategyError(
            f"pp: {num_stages} stages, but the model is a chain of {num_layers} layers; the most "
            f"stages are {num_layers}"
        )
    upto = [0.0, *accumulate(costs)]
    return _most_even(upto, num_stages, _slowest(upto, num_stages))


def _slowest(upto: Sequence[float], num_stages: int) -> float:
    """Return the cost of the slowest stage of the best cut.

    It is the cost of some range of layers: the least with which stages, each filled as far as that
    allows, come to the end. A cut of fewer stages can always be cut further.
    """
    num_layers = len(upto) - 1

    def suffices(most: float) -> bool:
        begin = 0
        for _ in range(num_stages):
            # The last layer that costs no more, by the same difference that costs are.
            end = bisect_right(upto, most, begin, key=lambda there: there - upto[begin]) - 1
            if end == num_layers:
                return True
            begin = end
        return False

    costs = sorted({there - here for here, there in combinations(upto, 2)})
    return costs[bisect_left(costs, True, key=suffices)]


def _most_even(upto: Sequence[float], num_stages: int, most: float) -> list[range]:
    """Return the cut of least sum of squares whose stages cost at most `most`; there is one.

    `upto` has the cost of the layers before each, and of all.
    """
    num_layers = len(upto) - 1
    # Number of layers -> value and stages of the best cut of that many of the first.
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        found: dict[int, tuple[float, list[range]]] = {}
        for begin, (so_far, stages) in best.items():
            for end in range(begin + 1, num_layers - (num_stages - stage) + 2):
                cost = upto[end] - upto[begin]
                if cost > most:
                    break
                new = so_far + cost**2
                if end not in found or new < found[end][0]:
                    found[end] = new, [*stages, range(begin, end)]
        best = found
    return best[num_layers][1]


def stage_costs(costs: Sequence[float], stages: Sequence[range]) -> list[float]:
    """Return the cost of each stage."""
    return [sum(costs[layer] for layer in layers) for layers in stages]


def imbalance(costs: Sequence[float], stages: Sequence[range]) -> float:
    """Return slowest / mean of the stages, at least 1."""
    of_stages = stage_costs(costs, stages)
    return max(of_stages) * len(of_stages) / sum(of_stages)
