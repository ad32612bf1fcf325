"""Tables on the strategy that a run prints first: pipeline stages, tp shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import chain_flops
from phalanx.parallel.pipeline.partition import imbalance, stage_costs
from phalanx.parallel.pipeline.simulate import UNITS, simulate
from phalanx.parallel.plan import plan_decoder
from phalanx.parallel.split import ParameterSplit
from phalanx.report.tabular import Line, Number, Part, Table
from phalanx.report.units import percent
from phalanx.strategy import Strategy


def tables_of(strategy: Strategy, shape: ModelShape, num_microbatches: int) -> list[Part]:
    """Return tables and lines on a strategy for a decoder; empty if there is nothing to show."""
    said: list[Part] = []
    if len(strategy.mesh_axes()) > 1:
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", strategy.num_ranks))
        said += [Line(line, "yellow") for line in host_crossing_warnings(strategy, num_here)]
    plan = plan_decoder(strategy, shape)
    schedule = plan.schedule(num_microbatches)
    if plan.cut is not None and schedule is not None:
        flops = chain_flops(shape)
        costs = stage_costs(flops, plan.cut)
        said += [stage_table(plan.cut, schedule.rank_of, flops)]
        # The bubble is simulated from the FLOPs of the stages.
        timeline = simulate(schedule, lambda action: UNITS[action.op] * costs[action.stage])
        bubble = percent(timeline.bubble)
        line = f"{num_microbatches} microbatches a step: ranks wait {bubble} of it"
        if num_microbatches < strategy.pp.degree and strategy.pp.kind != "naive":
            line += f"; batch.accumulation {2 * strategy.pp.degree} would fill the pipeline"
        said += [line]
    if plan.layout is not None:
        said += [split_table(plan.table())]
    return said


def host_crossing_warnings(strategy: Strategy, num_here: int) -> Iterator[str]:
    """Yield a warning for each axis except pp, dp and fsdp whose ranks span several hosts."""
    span = 1
    for name, axis in reversed([*strategy.axes()]):
        begin, span = span, span * axis.degree
        is_within = name not in ("pp", "dp", "fsdp") and axis.degree > 1
        if is_within and (span > num_here or num_here % span):
            yield (
                f"{name}{axis.degree} spans several hosts of {num_here} ranks, but communicates in "
                f"each layer, which is slow between hosts; {max(1, num_here // begin)} of its "
                "ranks fit on one host"
            )


def stage_table(cut: Sequence[range], rank_of: Sequence[int], flops: Sequence[float]) -> Table:
    """Return a table of pipeline stages with their pp rank, layers and part of the FLOPs."""
    costs = stage_costs(flops, cut)
    rows = [
        (stage, rank_of[stage], layers_text(links, len(flops) - 2), cost / sum(costs))
        for stage, (links, cost) in enumerate(zip(cut, costs, strict=True))
    ]
    heads = (Number("stage", "d"), Number("pp rank", "d"), "layers", Number("FLOPs", percent))
    note = f"slowest stage / mean: {imbalance(flops, cut):.2f}"
    return Table("Stages of the pipeline", heads, rows, note=note)


def layers_text(links: Sequence[int], num_layers: int) -> str:
    """Return the layers of a stage in words."""
    blocks = [link - 1 for link in links if 0 < link <= num_layers]
    words = ["embedding"] if 0 in links else []
    if blocks:
        words += [f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"]
    words += ["norm and head"] if num_layers + 1 in links else []
    return ", ".join(words)


def split_table(rows: Iterable[ParameterSplit]) -> Table:
    """Return a table of the tp shard of each parameter of the first stage."""
    heads = ("parameter", "role", "full shape, split over", "a rank's shard")
    lines = [(row.name, row.role, row.notation, " x ".join(map(str, row.shard))) for row in rows]
    return Table("What tp does to each parameter", heads, lines)
