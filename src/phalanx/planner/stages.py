"""What a pipeline makes of a decoder, before any process starts: its stages and what they hold.

No torch. A stage keeps, of each microbatch between its forward and its backward, what its blocks
keep; the schedule says how many those are at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import cut_of, schedule_of
from phalanx.planner.activations import Activations
from phalanx.planner.model_shape import num_parameters
from phalanx.strategy import Strategy


def parameters_of(
    strategy: Strategy, shape: ModelShape, pp_rank: int, cut: Sequence[range] | None = None
) -> int:
    """Return how many parameters the stages of a rank have, before other axes split them.

    The stages are those of `cut`, or of the strategy's.
    """
    count, num_layers = num_parameters(shape), shape.num_layers
    if strategy.pp.degree == 1:
        return count.total
    last_norm = shape.hidden * (2 if shape.norm == "layer" else 1)
    block = (count.attention + count.mlp + count.norm - last_norm) // num_layers
    first = count.embedding + count.position
    last = last_norm + (count.embedding if shape.tied else count.output)
    cut, here = cut or cut_of(strategy, shape), schedule_of(strategy, 1).stages_of(pp_rank)
    links = [link for stage in here for link in cut[stage]]
    sizes = [first, *[block] * num_layers, last]
    total = sum(sizes[link] for link in links)
    has_both = 0 in links and num_layers + 1 in links
    return total - (count.embedding if shape.tied and has_both else 0)


def held_of(
    strategy: Strategy,
    shape: ModelShape,
    of: Activations,
    num_microbatches: int,
    pp_rank: int,
    cut: Sequence[range] | None = None,
) -> int:
    """Return the most bytes that a rank holds for backward, without buffers that pass.

    Args:
        strategy: how the work is split.
        shape: the decoder.
        of: what a rank that runs the whole model holds of one microbatch.
        num_microbatches: of a step.
        pp_rank: coordinate of the rank on pp.
        cut: the links of each stage; the strategy's if None.
    """
    if strategy.pp.degree == 1:
        return of.peak
    schedule, cut = schedule_of(strategy, num_microbatches), cut or cut_of(strategy, shape)
    kept = [_kept(links, shape, of) for links in cut]
    held = peak = 0
    for op, stage, _ in schedule.orders[pp_rank]:
        if op == "F":
            held += kept[stage]
        elif op != "W":
            head = of.head if stage == len(cut) - 1 else 0
            peak = max(peak, held - head + of.recomputed + of.gradient + of.passing)
        peak = max(peak, held)
        if op in ("B", "W"):
            held -= kept[stage]
    return peak


def _kept(links: Sequence[int], shape: ModelShape, of: Activations) -> int:
    """Return what a stage keeps of a microbatch: of its blocks, what it got and what it sent."""
    last = shape.num_layers + 1
    num_blocks = sum(0 < link < last for link in links)
    end = of.head if last in links else of.gradient  # what was sent is as large as its gradient
    return of.blocks * num_blocks // shape.num_layers + of.inputs + end
