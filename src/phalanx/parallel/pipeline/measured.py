"""Cut a chain of modules by the time that each link takes, not by its FLOPs.

FLOPs know nothing of what a link does beside matrix products, nor of how fast those are at its
sizes. So the links run alone, one after the other on what the one before has made, forward and
backward, and the cut whose slowest stage is the fastest is found for their times.
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
    """Return the median seconds of forward and of backward of each link, of `num_rounds` rounds.

    One round more goes before, in which buffers are made. The stages are of one link each, all of
    them here, and `forward` is as `Stages.run` takes it: in the end a sum of losses.
    """
    stages.prepare()
    rounds = [_one_round(stages, forward) for _ in range(1 + num_rounds)][1:]
    return [
        (statistics.median(f for f, _ in of_link), statistics.median(b for _, b in of_link))
        for of_link in zip(*rounds, strict=True)
    ]


def with_best_cut(strategy: Strategy, times: Sequence[float]) -> Strategy:
    """Return the strategy with the best cut of links that take so long."""
    best = partition(times, num_stages(strategy))
    return dataclasses.replace(strategy, cut=tuple(len(links) for links in best))


def _one_round(stages: Stages, forward: Callable[[], Tensor]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    received: Tensor | None = None
    for stage in range(stages.num_stages):
        for weight in stages.weights(stage):
            weight.grad = None
        begin_s = _now_s()
        output = stages.run(stage, received, forward)
        middle_s = _now_s()
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        found.append((middle_s - begin_s, _now_s() - middle_s))
        received = output.detach().requires_grad_()
    return found


def _now_s() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
