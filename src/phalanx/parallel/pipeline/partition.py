"""Cut a chain of layers into stages so that the slowest stage is as fast as possible; no torch.

A pipeline is as fast as its slowest stage. The result is the exact optimum: the best cut of the
first n layers into s stages is the best cut of the first k into s - 1 stages, plus layers k to n as
the last stage, for the best k (the linear partition problem; Skiena, The Algorithm Design Manual,
section 10.7).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, combinations

from phalanx.errors import StrategyError


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """Return the layers of each stage, in order; every stage has at least one.

    If several cuts have an equally fast slowest stage, the result is the most even one, with the
    smallest sum of squared stage costs.

    Args:
        costs: forward and backward cost of each layer, in FLOPs or seconds, at least 0.
        num_stages: number of stages, at least 1.

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

    # The slowest stage of the best cut costs as much as some range of layers: the smallest limit
    # with which greedily filled stages reach the last layer. A cut with fewer stages can always be
    # cut further.
    def suffices(limit: float) -> bool:
        begin = 0
        for _ in range(num_stages):
            # The longest stage within the limit; the same difference as in `limits` rounds equally.
            end = bisect_right(upto, limit, begin, key=lambda end: end - upto[begin]) - 1
            if end == num_layers:
                return True
            begin = end
        return False

    # Costs 3 1 4, upto 0 3 4 8: the ranges cost 1 3 4 5 8. With two stages 1 and 3 do not suffice
    # (3 | 1 ...), but 4 does (3 1 | 4), and so do all larger limits: a bisection finds it.
    limits = sorted({end - begin for begin, end in combinations(upto, 2)})
    most = limits[bisect_left(limits, True, key=suffices)]

    # Of the cuts within that limit, the smallest sum of squares. n -> sum of squares and stages of
    # the best cut of the first n layers, stage after stage.
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        extended: dict[int, tuple[float, list[range]]] = {}
        for begin, (so_far, stages) in best.items():
            # At least one layer remains for each later stage.
            for end in range(begin + 1, num_layers - (num_stages - stage) + 2):
                cost = upto[end] - upto[begin]
                if cost > most:
                    break
                new = so_far + cost**2
                if end not in extended or new < extended[end][0]:
                    extended[end] = new, [*stages, range(begin, end)]
        best = extended
    return best[num_layers][1]


def stage_costs(costs: Sequence[float], stages: Sequence[range]) -> list[float]:
    """Return the cost of each stage, the sum of its layers' costs."""
    return [sum(costs[layer] for layer in layers) for layers in stages]


def imbalance(costs: Sequence[float], stages: Sequence[range]) -> float:
    """Return the cost of the slowest stage divided by the mean stage cost, at least 1."""
    of_stages = stage_costs(costs, stages)
    return max(of_stages) * len(of_stages) / sum(of_stages)
