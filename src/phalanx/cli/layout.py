"""What a run says of its strategy at first: who sits where, the stages, and what tp does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from phalanx.measure.utilization import percent
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import chain_flops
from phalanx.parallel.pipeline.partition import imbalance, stage_costs
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.pipeline.simulate import UNITS, simulate
from phalanx.parallel.plan import plan_decoder
from phalanx.parallel.split import Row
from phalanx.strategy import Strategy

MOST_PLACES = 32
"""Ranks of which each is listed; of more the first, and the rest in words."""


def tables_of(strategy: Strategy, shape: ModelShape, num_microbatches: int) -> list[RenderableType]:
    """Return the tables and lines on a strategy on a decoder, perhaps none."""
    said: list[RenderableType] = []
    if len(strategy.mesh_axes()) > 1:
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", strategy.num_ranks))
        said += [place_table(strategy, num_here)]
        said += [Text(line, style="yellow") for line in crossings(strategy, num_here)]
    plan = plan_decoder(strategy, shape)
    schedule = plan.schedule(num_microbatches)
    if plan.cut is not None and schedule is not None:
        flops = chain_flops(shape)
        costs = stage_costs(flops, plan.cut)
        said += [stage_table(plan.cut, schedule.rank_of, flops)]
        said += [Text(_schedule_line(strategy, schedule, costs, num_microbatches))]
    if plan.layout is not None:
        said += [split_table(plan.table())]
    return said


def place_table(strategy: Strategy, num_here: int) -> Table:
    """Draw the coordinates and the host of each rank; each host has `num_here` of them."""
    axes = strategy.mesh_axes()
    columns = [Column(name, justify="right") for name in ("rank", *axes, "host")]
    table = Table(*columns, title="Who sits where", title_justify="left", box=None)
    for rank in range(min(strategy.num_ranks, MOST_PLACES)):
        coords, left = list[int](), rank
        for size in reversed(axes.values()):
            left, coord = divmod(left, size)
            coords.insert(0, coord)
        table.add_row(*map(str, (rank, *coords, rank // num_here)))
    if strategy.num_ranks > MOST_PLACES:
        table.add_row("...")
        table.caption = f"and so on to rank {strategy.num_ranks - 1}, the last axis first"
    return table


def crossings(strategy: Strategy, num_here: int) -> Iterator[str]:
    """Yield a warning for each axis within pp and dp whose ranks are on several hosts."""
    span = 1
    for name, axis in reversed([*strategy.axes()]):
        begin, span = span, span * axis.degree
        is_within = name not in ("pp", "dp", "fsdp") and axis.degree > 1
        if is_within and (span > num_here or num_here % span):
            yield (
                f"{name}{axis.degree} is on several hosts of {num_here} ranks, and sends in each "
                f"layer, which is slow between hosts; {max(1, num_here // begin)} of its ranks fit "
                "on one"
            )


def stage_table(cut: Sequence[range], rank_of: Sequence[int], flops: Sequence[float]) -> Table:
    """Draw the stages of a pipeline, their ranks, layers and cost."""
    costs = stage_costs(flops, cut)
    columns = [Column("stage", justify="right"), Column("pp rank", justify="right")]
    columns += [Column("layers"), Column("FLOPs", justify="right")]
    title = "Stages of the pipeline"
    table = Table(*columns, title=title, title_justify="left", box=None)
    for stage, (links, cost) in enumerate(zip(cut, costs, strict=True)):
        layers = layers_text(links, len(flops) - 2)
        table.add_row(str(stage), str(rank_of[stage]), layers, percent(cost / sum(costs)))
    table.caption = f"slowest stage / mean: {imbalance(flops, cut):.2f}"
    table.caption_justify = "left"
    return table


def layers_text(links: Sequence[int], num_layers: int) -> str:
    """Return the layers of a stage in words."""
    blocks = [link - 1 for link in links if 0 < link <= num_layers]
    words = ["embedding"] if 0 in links else []
    if blocks:
        words += [f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}"]
    words += ["norm and head"] if num_layers + 1 in links else []
    return ", ".join(words)


def _schedule_line(
    strategy: Strategy, schedule: Schedule, costs: Sequence[float], num_microbatches: int
) -> str:
    """Say how long ranks wait under the schedule, by the cost of their stages alone."""
    timeline = simulate(schedule, lambda action: UNITS[action.op] * costs[action.stage])
    line = f"{num_microbatches} microbatches a step: ranks wait {percent(timeline.bubble)} of it"
    if num_microbatches < strategy.pp.degree and strategy.pp.kind != "naive":
        line += f"; batch.accumulation {2 * strategy.pp.degree} would fill the pipeline"
    return line


def split_table(rows: Iterable[Row]) -> Table:
    """Draw what tp does to each parameter of the first stage."""
    columns = ("parameter", "role", "full shape, split over", "a rank's shard")
    title = "What tp does to each parameter"
    table = Table(*columns, title=title, title_justify="left", box=None)
    for row in rows:
        shard = " x ".join(map(str, row.shard))
        table.add_row(Text(row.name), row.role, Text(row.notation), shard)
    return table
