"""Cut a chain of modules by the measured time of each link, instead of its FLOPs.

FLOPs ignore operators other than matrix products, and the speed of products at the sizes of a link.
So the links run one after another, each on the output of the one before, forward and backward, and
the measured times determine the cut whose slowest stage is fastest.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.parallel.pipeline.cut import num_stages
from phalanx.parallel.pipeline.partition import partition
from phalanx.parallel.pipeline.stage import Stages
from phalanx.strategy import Strategy


def link_times(
    stages: Stages, forward: Callable[[], Tensor], num_rounds: int
) -> list[tuple[float, float]]:
    """Return the median seconds of forward and of backward of each link, over `num_rounds` rounds.

    One untimed round runs before, to allocate buffers. `stages` has one link in each stage, and all
    stages on this rank. `forward`, as for `Stages.run`, returns a sum of losses.
    """
    stages.prepare()
    rounds: list[list[tuple[float, float]]] = []
    for _ in range(1 + num_rounds):
        times: list[tuple[float, float]] = []
        received: Tensor | None = None
        for stage in range(stages.num_stages):
            for weight in stages.weights(stage):
                weight.grad = None
            begin_s = _now_s()
            output = stages.run(stage, received, forward)
            middle_s = _now_s()
            if output.requires_grad:
                output.backward(torch.ones_like(output))
            times.append((middle_s - begin_s, _now_s() - middle_s))
            received = output.detach().requires_grad_()
        rounds.append(times)
    return [
        (statistics.median(f for f, _ in of_link), statistics.median(b for _, b in of_link))
        for of_link in zip(*rounds[1:], strict=True)
    ]


def with_best_cut(strategy: Strategy, times: Sequence[float]) -> Strategy:
    """Return the strategy with the best cut for links with these `times`, in seconds."""
    best = partition(times, num_stages(strategy))
    return dataclasses.replace(strategy, cut=tuple(len(links) for links in best))


def _now_s() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
