"""Where to cut a chain of layers, so that the slowest stage is as fast as it can be; no torch.

A pipeline is as fast as its slowest stage. The optimum is exact: the best cut of the first n layers
into s stages is the best cut of the first k into s - 1, and layers k to n as the last, for the best
k (the linear partition problem; Skiena, The Algorithm Design Manual, section 10.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from phalanx.errors import StrategyError

Fits = Callable[[range, int], bool]
"""Whether layers fit into the memory of a stage: (layers, number of the stage)."""


def partition(
    costs: Sequence[float], num_stages: int, fits: Fits = lambda layers, stage: True
) -> list[range]:
    """Return the layers of each stage, in order; every stage has at least one.

    Of the cuts whose slowest stage is equally fast, it is the most even: that of the least sum of
    squares.

    Args:
        costs: forward and backward of each layer, in FLOPs or seconds, at least 0.
        num_stages: at least 1.
        fits: which stages are allowed.

    Raises:
        StrategyError: there are fewer layers than stages, or no cut fits.
    """
    num_layers = len(costs)
    if num_stages > num_layers:
        raise StrategyError(
            f"pp: {num_stages} stages, but the model is a chain of {num_layers} layers; the most "
            f"stages are {num_layers}"
        )
    upto = [0.0, *accumulate(costs)]

    def cost(layers: range) -> float:
        return upto[layers.stop] - upto[layers.start]

    fastest = _best_cut(num_layers, num_stages, fits, lambda so_far, new: max(so_far, cost(new)))
    if fastest is None:
        raise StrategyError(
            f"pp: no cut of {num_layers} layers into {num_stages} stages fits the memory of every "
            "stage; take more stages, recompute:full, or a smaller microbatch"
        )
    slowest = max(map(cost, fastest))
    even = _best_cut(
        num_layers,
        num_stages,
        lambda layers, stage: cost(layers) <= slowest and fits(layers, stage),
        lambda so_far, new: so_far + cost(new) ** 2,
    )
    assert even is not None
    return even


def _best_cut(
    num_layers: int, num_stages: int, fits: Fits, value: Callable[[float, range], float]
) -> list[range] | None:
    """Return the cut of least value, or None if none fits.

    Args:
        num_layers: of the chain.
        num_stages: of the cut.
        fits: which stages are allowed.
        value: of a cut, from that of its stages but the last, and the last.
    """
    # Number of layers -> value and stages of the best cut of that many of the first.
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        found: dict[int, tuple[float, list[range]]] = {}
        for begin, (so_far, stages) in best.items():
            for end in range(begin + 1, num_layers + 1):
                layers = range(begin, end)
                new = value(so_far, layers)
                if (end not in found or new < found[end][0]) and fits(layers, stage):
                    found[end] = new, [*stages, layers]
        best = found
    return best[num_layers][1] if num_layers in best else None


def stage_costs(costs: Sequence[float], stages: Sequence[range]) -> list[float]:
    """Return the cost of each stage."""
    return [sum(costs[layer] for layer in layers) for layers in stages]


def imbalance(costs: Sequence[float], stages: Sequence[range]) -> float:
    """Return slowest / mean of the stages, at least 1."""
    of_stages = stage_costs(costs, stages)
    return max(of_stages) * len(of_stages) / sum(of_stages)
