"""The stages and the schedule of a strategy on a decoder. No torch."""

from __future__ import annotations

import functools

from phalanx.errors import StrategyError
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.partition import partition
from phalanx.parallel.pipeline.schedule import Schedule, build_schedule, with_whole_backwards
from phalanx.strategy import Strategy


@functools.lru_cache
def schedule_of(strategy: Strategy, num_microbatches: int) -> Schedule:
    """Return the schedule of a strategy, as its ranks run it.

    Operators of tp and cp, what fsdp gathers and what is run again make both gradients of a layer
    at once: beside these a backward is whole.
    """
    pp = strategy.pp
    schedule = build_schedule(pp.kind, pp.degree, num_microbatches, pp.option or 1)
    is_plain = strategy.fsdp.degree == strategy.tp.degree == strategy.cp.degree == 1
    if is_plain and strategy.recompute.kind == "none":
        return schedule
    return with_whole_backwards(schedule)


def num_stages(strategy: Strategy) -> int:
    """Return how many stages a strategy cuts a model into."""
    return schedule_of(strategy, 1).num_stages


@functools.lru_cache
def cut_of(strategy: Strategy, shape: ModelShape) -> tuple[range, ...]:
    """Return the links of each stage: 0 is the embedding, then come the blocks, then the head.

    Raises:
        StrategyError: there are more stages than links.
    """
    chain, stages = chain_flops(shape), num_stages(strategy)
    if stages > len(chain):
        raise StrategyError(
            f"pp: {strategy} makes {stages} stages, but the model is a chain of {len(chain)} "
            f"layers: embedding, {shape.num_layers} blocks and head; the most stages are "
            f"{len(chain)}"
        )
    return tuple(partition(chain, stages))


def chain_flops(shape: ModelShape) -> list[float]:
    """Return the FLOPs a token, forward and backward, of embedding, each block and head.

    They are those of products alone, as planner/model_shape.py counts them; attention is that of
    rows of `shape.max_seq_len`, causal.
    """
    queries, groups = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    num_maps = 3 if shape.mlp == "swiglu" else 2
    weights = shape.hidden * (2 * queries + 2 * groups + num_maps * shape.ffn)
    block = 6 * weights + 6 * (shape.max_seq_len + 1) * queries
    head = 6 * shape.vocab_size * shape.hidden
    return [0.0, *[float(block)] * shape.num_layers, float(head)]
