"""A lower bound of the step time of a strategy, from its operations and its large messages.

The search prices strategies in the order of this bound, and stops when the bound exceeds the best
prices. So the bound must be fast to compute, and never above the price.

    a rank      its first forward waits for the forwards of the stages before its first stage, and
                the backwards of these stages follow its last backward: one forward and backward of
                these stages, and the rank's own stages for all microbatches
                a schedule that splits backward may leave only weight gradients to the end: then
                one forward of these stages, and the rank's own stages
    the step    the longest rank, for any order of actions in the schedule
                + the forwards that count loads of experts, of the longest rank
                + communication of dp and fsdp beyond the part that compute can overlap
                + the optimizer's step
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.account.parameters import BlockKind, block_kinds, block_parameters, num_parameters
from phalanx.account.planned import DecoderModel, PlannedStep
from phalanx.comm.axes import AXIS_SETS, DENSE, EXPERT, ParameterAxes
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import cut_of, schedule_of, splits_backward
from phalanx.planner import network
from phalanx.planner.machine import Cluster
from phalanx.planner.parts import MEMORY, DeviceHostSeconds, part_seconds
from phalanx.planner.price import ADAM_WORDS, tensor_host_s
from phalanx.planner.software import Software
from phalanx.strategy import Axis, Strategy

_ITEM_BYTES = 2
"""Least bytes of an element in a message."""

_CALLS = 8
"""Least number of tp all-gathers and reduce-scatters of a block, forward and backward."""

_INPUTS, _HEAD, _MESSAGE = "inputs", "head", "message"
"""Keys of a stage's parts other than blocks; the key of a block is its kind."""

Step = PlannedStep[DecoderModel]

Parts = Mapping[BlockKind | str, int]
"""Key of a part -> number of these parts: blocks by kind, inputs, heads and messages."""


def bound_s(planned: Step, cluster: Cluster, software: Software) -> float:
    """Return the bound in seconds.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    least_s, blocks = _pipeline(planned.with_one_data_axis, cluster, software)
    weights, overlap = _weights(planned, blocks), software.overlap
    sent_s = _sent_s(planned, weights, cluster, software)
    # As in `price`, with the bound in place of the compute time: compute hides no more than that.
    exposed_s = max(sent_s - overlap * least_s, 0.5 * (1 - overlap) * sent_s)
    optimizer_s = 0.0
    if cluster.device.core is None:
        num = sum(each.total / each.num_shards for each in weights)
        optimizer_s = 4 * ADAM_WORDS * num / (cluster.device.bandwidth * MEMORY)
    return least_s + exposed_s + optimizer_s


def pipeline_s(planned: Step, cluster: Cluster, software: Software) -> float:
    """Return the bound in seconds for all dp and fsdp with as many data ranks.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    return _pipeline(planned.with_one_data_axis, cluster, software)[0]


def balanced_s(planned: Step, cluster: Cluster, software: Software) -> float:
    """Return the bound in seconds for all kinds of pp, too: equal ranks without a bubble.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    seconds, forward = _seconds(_of_one_kind(planned.with_one_data_axis), cluster, software)
    parts = _INPUTS, _HEAD, *block_kinds(planned.model.shape)
    model_s = sum(seconds[part] for part in parts)
    model_s += planned.counts_loads * sum(forward[part] for part in parts)
    return planned.accumulation * model_s / planned.strategy.pp.degree


def _of_one_kind(planned: Step) -> Step:
    """Return the step of one microbatch with the default kind of pp: its parts take as long."""
    pp = Axis(planned.strategy.pp.degree, Strategy.pp.kind)
    strategy = dataclasses.replace(planned.strategy, pp=pp)
    return dataclasses.replace(planned, strategy=strategy, accumulation=1)


@functools.lru_cache(maxsize=1 << 15)
def _pipeline(
    planned: Step, cluster: Cluster, software: Software
) -> tuple[float, tuple[BlockKind, ...]]:
    """Return the bound without dp and fsdp, in seconds, and the blocks of the first rank."""
    strategy, num = planned.strategy, planned.accumulation
    ranks = _of_ranks(strategy.pp, strategy.cut, planned.model.shape)
    both, forward = _seconds(_of_one_kind(planned), cluster, software)
    around = forward if splits_backward(strategy) else both
    # The work that no order of actions can move away from rank r, whose first stage is s:
    #
    #     stages 0 .. s-1   F . F |                         | B . B    `before`: one microbatch
    #     rank r                  | F F F B F B F B F B B B |          `own`: all microbatches
    #
    # A schedule that splits backward may fill the end with weight gradients, so that only the
    # forwards of `before` are sure.
    least_s = max(
        num * sum(of * both[part] for part, of in rank.own.items())
        + sum(of * around[part] for part, of in rank.before.items())
        for rank in ranks
    )
    if planned.counts_loads:
        least_s += num * max(
            sum(of * forward[part] for part, of in rank.own.items() if part != _MESSAGE)
            for rank in ranks
        )
    first = ranks[0].own.items()
    return least_s, tuple(
        part for part, of in first if isinstance(part, BlockKind) for _ in range(of)
    )


class _OfRank(NamedTuple):
    """The parts of a rank's stages, and the parts of all stages before its first stage."""

    own: Parts
    before: Parts


@functools.lru_cache(maxsize=256)
def _of_ranks(pp: Axis, cut: tuple[int, ...], shape: ModelShape) -> list[_OfRank]:
    """Return the first pipeline rank, and the last rank of each set of ranks with equal parts."""
    strategy, last = Strategy(pp=pp, cut=cut), shape.num_layers + 1
    links_of, schedule = cut_of(strategy, shape), schedule_of(strategy, 1)
    kinds = block_kinds(shape)
    parts: list[Counter[BlockKind | str]] = []
    for stage, links in enumerate(links_of):
        of = Counter[BlockKind | str](kinds[link - 1] for link in links if 0 < link < last)
        of[_INPUTS], of[_HEAD] = int(0 in links), int(last in links)
        # A message counts for each neighbour stage on another rank: one forward, one in backward.
        beside = schedule.rank_of[max(0, stage - 1) : stage + 2]
        of[_MESSAGE] = sum(rank != schedule.rank_of[stage] for rank in beside)
        parts.append(of)
    distinct: dict[frozenset[tuple[BlockKind | str, int]], _OfRank] = {}
    for rank in range(pp.degree):
        own, before = Counter[BlockKind | str](), Counter[BlockKind | str]()
        for stage in schedule.stages_of(rank):
            own.update(parts[stage])
        for stage in range(schedule.stages_of(rank)[0]):
            before.update(parts[stage])
        distinct[frozenset(own.items()) if rank else frozenset()] = _OfRank(own, before)
    return [*distinct.values()]


Seconds = Mapping[BlockKind | str, float]
"""Key of a part -> a lower bound of its seconds for one microbatch."""


@functools.lru_cache(maxsize=1 << 15)
def _seconds(planned: Step, cluster: Cluster, software: Software) -> tuple[Seconds, Seconds]:
    """Return the seconds of each part, forward and backward, and of its forward alone."""
    shape, device = planned.model.shape, cluster.device
    strategy = planned.strategy
    axes, tp = strategy.mesh_axes(), strategy.tp.degree
    tokens = planned.microbatch * planned.seq_len / strategy.sample_shards
    stream_bytes = _ITEM_BYTES * tokens * shape.hidden  # the residual, before tp splits it
    of_half = network.group_of(axes, ("tp",)), _CALLS * stream_bytes * (1 - 1 / tp) / 2, _CALLS // 2
    halves = "all_gather", "reduce_scatter"
    host_s = (_CALLS if tp > 1 else 0) * tensor_host_s(strategy, cluster, software)
    tensor = DeviceHostSeconds(
        sum(network.seconds(op, *of_half, cluster, software) for op in halves), host_s
    )
    sent = network.group_of(axes, ("pp",)), stream_bytes / tp, 1
    message_s = network.seconds("send", *sent, cluster, software)
    kinds = dict.fromkeys(block_kinds(shape))
    parts = {each: part_seconds(planned, device, software, each) for each in kinds}
    any_part = next(iter(parts.values()))
    ends: dict[BlockKind | str, float] = {
        _INPUTS: any_part.inputs.alone,
        _HEAD: any_part.head.alone,
    }
    both, forward = ends | {_MESSAGE: message_s}, ends | {_MESSAGE: message_s / 2}
    exchanges_s = _exchanges_s(planned, tokens, cluster, software)
    for kind, of in parts.items():
        whole = DeviceHostSeconds(*map(sum, zip(of.block, of.again_and_backward, strict=True)))
        both[kind] = whole.with_collectives(tensor) + kind.has_experts * exchanges_s
        forward[kind] = of.block.alone
    return both, forward


def _exchanges_s(planned: Step, tokens: float, cluster: Cluster, software: Software) -> float:
    """Return a lower bound of the exchanges of a block's rows over ep: two in each pass."""
    model, strategy, num = planned.model, planned.strategy, planned.strategy.ep.degree
    experts = model.shape.experts
    if experts is None or num == 1:
        return 0.0
    rows = tokens * experts.top_k * min(1, experts.capacity or 1)
    times = 4 if strategy.recompute.kind == "none" else 6
    sent = times * _ITEM_BYTES * rows * model.shape.hidden * (1 - 1 / num)
    group = network.group_of(strategy.mesh_axes(), ("ep",))
    of = group, sent, times, cluster, software, experts.top_k
    each = model.imbalance / (strategy.tp.degree if software.sends_rows_once else 1)
    return each * network.seconds("all_to_all", *of)


class _Weights(NamedTuple):
    """Parameters of the first rank, before fsdp splits them, that have equal axes.

    Attributes:
        axes: the axes that fsdp shards them over, and `num_shards` the number of shards.
        blocks: parameters of each block.
        others: parameters of the embedding.
    """

    axes: ParameterAxes
    num_shards: int
    blocks: tuple[float, ...]
    others: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.blocks) + self.others


def _weights(planned: Step, kinds: Sequence[BlockKind]) -> list[_Weights]:
    """Return the parameters of the first rank: all but experts, and the experts."""
    shape, strategy = planned.model.shape, planned.strategy
    tp, ep = strategy.tp.degree, strategy.ep.degree
    blocks = [block_parameters(shape, has_experts=kind.has_experts) for kind in kinds]
    if shape.lora is not None:  # only their gradients are certain to be sent
        adapters = tuple(block.adapters / tp for block in blocks)
        return [_Weights(DENSE, strategy.num_shards, adapters)]
    dense = tuple((block.attention + block.mlp) / tp for block in blocks)
    embedding = num_parameters(shape).embedding / tp
    experts = tuple(block.experts / tp / ep for block in blocks if block.experts)
    return [
        _Weights(DENSE, strategy.num_shards, dense, embedding),
        _Weights(EXPERT, strategy.num_expert_shards // ep, experts or (0.0,)),
    ]


def _sent_s(
    planned: Step, weights: Sequence[_Weights], cluster: Cluster, software: Software
) -> float:
    """Return a lower bound of dp and fsdp communication of the first rank: embedding and blocks.

    zero3 gathers twice and reduces once for each microbatch; zero2 gathers once a step. Each block
    is a call of its own; the last block and the embedding may stay gathered for backward.
    Gradients have 32 bits.
    """
    strategy, num = planned.strategy, planned.accumulation
    kind, has_shards = strategy.fsdp.kind, strategy.fsdp.degree > 1
    least_s = 0.0
    for each in weights:
        of_blocks, reductions = sum(each.blocks), 1
        if has_shards:
            # Calls for each block, in one step of `num` microbatches:
            #
            #     zero1    gather                  1             reduce    1
            #     zero2    gather                  1             reduce    num
            #     zero3    gather, and again for   num, 2 num    reduce    num
            #              backward but in the last block, which backward begins with
            blocks, is_whole = len(each.blocks), kind == "zero3"
            gathers = max(0, 2 * blocks - 1) * num if is_whole else blocks
            gathered = (2 * of_blocks - max(each.blocks)) * num if is_whole else of_blocks
            once, times = (num if is_whole else 1), (1 if kind == "zero1" else num)
            sent = gathered + 2 * of_blocks * times + each.others * (once + 2 * times)
            part = _ITEM_BYTES * (1 - 1 / each.num_shards)
            of = "all_gather", AXIS_SETS[each.axes.shards], part * sent, gathers + blocks * times
            least_s, reductions = least_s + _least_s(planned, *of, cluster, software), blocks
        gradients = 2 * _ITEM_BYTES * each.total / each.num_shards
        of = "all_reduce", ("dp",), 2 * gradients * (1 - 1 / strategy.dp.degree), reductions
        least_s += _least_s(planned, *of, cluster, software)
    return least_s


def _least_s(
    planned: Step,
    op: str,
    names: tuple[str, ...],
    sent: float,
    calls: int,
    cluster: Cluster,
    software: Software,
) -> float:
    group = network.group_of(planned.strategy.mesh_axes(), names)
    measured = [cost.bandwidth for level in cluster.levels for cost in level.link.measured.values()]
    if group.size > 1 and measured:
        return sent / max(network.reach(group, cluster, software).bandwidth, *measured)
    return network.seconds(op, group, sent, calls, cluster, software)
