"""The schedule of a strategy, and its cut of a decoder or chain into stages; without torch."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence

from phalanx.errors import StrategyError
from phalanx.models.block_weights import block_weights, pair_width
from phalanx.models.shape import ModelShape, causal_pairs
from phalanx.parallel.pipeline.partition import partition
from phalanx.parallel.pipeline.schedule import (
    KINDS,
    Schedule,
    build_schedule,
    check_length,
    with_microbatches,
    with_whole_backwards,
)
from phalanx.parallel.pipeline.schedule_file import read_schedule, text_of
from phalanx.strategy import Axis, Strategy


def schedule_of(strategy: Strategy, num_microbatches: int) -> Schedule:
    """Return the schedule that the ranks of a strategy run, built from its kind or its file.

    A backward is not divided into I and W if the strategy has axes other than pp and dp, or
    recomputation, because their operators compute both gradients of a layer at once.

    Raises:
        StrategyError: the file has no valid schedule for `num_microbatches`.
    """
    of = strategy.pp, strategy.schedule, num_microbatches, splits_backward(strategy)
    return _schedule(*of)


def splits_backward(strategy: Strategy) -> bool:
    """Return whether the schedule of the strategy may divide a backward into I and W."""
    if not (strategy.schedule or KINDS[strategy.pp.kind].splits_backward):
        return False
    others = {name for name, axis in strategy.axes() if axis.degree > 1}.difference(("pp", "dp"))
    return not others and strategy.recompute.kind == "none"


def check_schedule(strategy: Strategy, num_microbatches: int) -> None:
    """Raise StrategyError if the schedule of a step would be too long to build."""
    if strategy.pp.degree > 1 and not strategy.schedule:
        check_length(strategy.pp.kind, num_stages(strategy), num_microbatches)


@functools.lru_cache
def _schedule(pp: Axis, path: str, num_microbatches: int, is_split: bool) -> Schedule:
    if path:
        schedule = with_microbatches(read_schedule(path, pp.degree), num_microbatches)
    else:
        schedule = build_schedule(pp.kind, pp.degree, num_microbatches, pp.option or 1)
    return schedule if is_split else with_whole_backwards(schedule)


def strategy_facts(strategy: Strategy) -> dict[str, str]:
    """Return the facts of a strategy that must be equal on all ranks: its text, its file's hash.

    Every rank reads the schedule file by itself, so the files may differ.

    Raises:
        StrategyError: the file has no valid schedule.
    """
    facts = {"strategy": str(strategy)}
    if path := strategy.schedule:
        text = "\n".join(text_of(read_schedule(path, strategy.pp.degree)))
        facts[f"sha256 of the schedule in {path}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return facts


def num_stages(strategy: Strategy) -> int:
    """Return the number of stages into which a strategy cuts a model."""
    if strategy.schedule:
        return schedule_of(strategy, 1).num_stages
    return strategy.pp.degree * (KINDS[strategy.pp.kind].chunks or strategy.pp.option or 1)


@functools.lru_cache
def cut_of(strategy: Strategy, shape: ModelShape) -> tuple[range, ...]:
    """Return the links of each stage of a decoder: link 0 is the embedding, then blocks, then head.

    Raises:
        StrategyError: see `cut_chain`.
    """
    layers = f"embedding, {shape.num_layers} blocks and head"
    return cut_chain(strategy, chain_flops(shape), layers)


def cut_chain(strategy: Strategy, costs: Sequence[float], layers: str) -> tuple[range, ...]:
    """Return the links of each stage of a chain: the strategy's cut, or else the best one.

    `costs` has the cost of each link; `layers` describes the links in error messages.

    Raises:
        StrategyError: there are more stages than links, or the strategy's cut has another number of
            stages or links.
    """
    stages, num_links = num_stages(strategy), len(costs)
    if stages > num_links:
        if num_links == 1:
            raise StrategyError(
                f"pp: {strategy} makes {stages} stages, but the model is a single layer, which "
                "cannot be cut; use dp or fsdp"
            )
        raise StrategyError(
            f"pp: {strategy} makes {stages} stages, but the model is a chain of {num_links} "
            f"layers: {layers}; the most stages are {num_links}"
        )
    if not strategy.cut:
        return _best_cut(tuple(costs), stages)
    if (len(strategy.cut), sum(strategy.cut)) != (stages, num_links):
        best = "+".join(str(len(links)) for links in partition(costs, stages))
        raise StrategyError(
            f"{strategy}: its cut has {len(strategy.cut)} stages of {sum(strategy.cut)} layers in "
            f"total, but there are {stages} stages, and the model is a chain of {num_links} "
            f"layers: {layers}; cut:{best} is the best by the cost of the layers"
        )
    return ranges_of(strategy.cut)


@functools.lru_cache(maxsize=1 << 10)
def _best_cut(costs: tuple[float, ...], num_stages: int) -> tuple[range, ...]:
    """Return the best cut; cached, because many strategies of one model need the same cut."""
    return tuple(partition(costs, num_stages))


def ranges_of(cut: Sequence[int]) -> tuple[range, ...]:
    """Return the range of links of each stage, given the number of links of each stage."""
    ends = [0, *itertools.accumulate(cut)]
    return tuple(map(range, ends, ends[1:]))


def chain_flops(shape: ModelShape) -> list[float]:
    """Return the FLOPs per token, forward and backward, of the embedding, each block, and the head.

    Only matrix products count, as in account/flops.py; attention is causal, over rows of
    `shape.max_seq_len`.
    """
    length, width = shape.max_seq_len, 6 * shape.num_heads * pair_width(shape)
    blocks = [
        6 * block_weights(shape, has_experts=shape.experts_of(block) is not None).active
        + width * causal_pairs(length, shape.window_of(block)) / length
        for block in range(shape.num_layers)
    ]
    head = 6 * shape.vocab_size * shape.hidden
    return [0.0, *blocks, float(head)]
