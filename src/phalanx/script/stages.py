"""The stages of a job's module under a pipeline, cut by the FLOPs that its modules were seen to do.

`parallel/pipeline/split.py` knows the parameters of a module alone, and those of a convolution say
little: the first layers of a residual network have few and do most of the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from phalanx.measure.utilization import percent
from phalanx.models.decoder import Decoder
from phalanx.parallel.pipeline.cut import cut_chain, schedule_of
from phalanx.parallel.pipeline.links import Links, links_of
from phalanx.parallel.pipeline.partition import imbalance, stage_costs
from phalanx.script.flops import Flops
from phalanx.strategy import Strategy


def cut_by_flops(
    strategy: Strategy, model: nn.Module, flops: Flops | None
) -> tuple[Strategy, list[str]]:
    """Return the strategy with the stages of the model, and what is to be said of them.

    Without pipelines, without FLOPs, and of our decoder, which has FLOPs of its own, nothing
    changes and nothing is said.

    Args:
        strategy: with the layers of each stage, or to be given those of the best cut.
        model: as it was built.
        flops: of its modules.

    Raises:
        StrategyError: the model is no chain, or has fewer links than there are stages.
    """
    if strategy.pp.degree == 1 or flops is None or isinstance(model, Decoder):
        return strategy, []
    links = links_of(model)
    costs = [float(sum(flops.of_module.get(name, 0) for name in link)) for link in links]
    cut = cut_chain(strategy, costs, ", ".join(" + ".join(link) for link in links))
    counted = dataclasses.replace(strategy, cut=tuple(map(len, cut)))
    return counted, _lines(counted, links, costs, cut)


def _lines(
    strategy: Strategy, links: Links, costs: Sequence[float], cut: Sequence[range]
) -> list[str]:
    rank_of, per_stage = schedule_of(strategy, 1).rank_of, stage_costs(costs, cut)
    lines: list[str] = []
    for stage, part in enumerate(cut):
        names = [name for at in part for name in links[at]]
        modules = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        share = percent(per_stage[stage] / sum(per_stage))
        lines.append(f"stage {stage}, rank {rank_of[stage]} of pp: {modules}, {share} of the FLOPs")
    return [*lines, f"slowest stage / mean: {imbalance(costs, cut):.2f}"]
