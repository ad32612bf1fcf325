"""A lower bound of the step time of a strategy, from its operations and its large messages.

The search prices strategies in the order of this bound, and stops when the bound exceeds the best
prices. So the bound must be fast to compute, and never above the price.

    a rank      its first forward waits for the forwards of the stages before its first stage, and
                the backwards of these stages follow its last backward: one forward and backward of
                these stages, and the rank's own stages for all microbatches
    the step    the longest rank, for any order of actions in the schedule
                + communication of dp and fsdp beyond the part that compute can overlap
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.account.parameters import num_parameters
from phalanx.comm.axes import AXIS_SETS, SHARDS
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import cut_of, schedule_of
from phalanx.planner import network
from phalanx.planner.machine import Cluster
from phalanx.planner.parts import DeviceHostSeconds, part_seconds
from phalanx.planner.planned import PlannedStep
from phalanx.planner.software import Software
from phalanx.strategy import Axis, Strategy

_ITEM_BYTES = 2
"""Least bytes of an element in a message."""

_CALLS = 8
"""Least number of tp all-gathers and reduce-scatters of a block, forward and backward."""

_INPUTS, _HEAD, _MESSAGE = "inputs", "head", "message"
"""Keys of a stage's parts other than blocks; the key of a block is its window."""

Parts = Mapping[int | str | None, int]
"""Key of a part -> number of these parts: blocks by window, inputs, heads and messages."""


def bound_s(planned: PlannedStep, cluster: Cluster, software: Software) -> float:
    """Return the bound in seconds, for schedules that do not split backward into two actions.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    pipeline_s, blocks = _pipeline(planned.with_one_data_axis, cluster, software)
    sent_s, overlap = _sent_s(planned, blocks, cluster, software), software.overlap
    return pipeline_s + max(sent_s - overlap * pipeline_s, 0.5 * (1 - overlap) * sent_s)


@functools.lru_cache(maxsize=1 << 15)
def _pipeline(planned: PlannedStep, cluster: Cluster, software: Software) -> tuple[float, int]:
    """Return the bound without dp and fsdp, in seconds, and the blocks of the first rank."""
    ranks = _of_ranks(planned.strategy.pp, planned.strategy.cut, planned.shape)
    seconds, num = _seconds(planned, cluster, software), planned.accumulation
    pipeline_s = max(
        num * sum(of * seconds[part] for part, of in rank.own.items())
        + sum(of * seconds[part] for part, of in rank.before.items())
        for rank in ranks
    )
    return pipeline_s, sum(of for part, of in ranks[0].own.items() if not isinstance(part, str))


class _OfRank(NamedTuple):
    """The parts of a rank's stages, and the parts of all stages before its first stage."""

    own: Parts
    before: Parts


@functools.lru_cache(maxsize=256)
def _of_ranks(pp: Axis, cut: tuple[int, ...], shape: ModelShape) -> list[_OfRank]:
    """Return the first pipeline rank, and the last rank of each set of ranks with equal parts."""
    strategy, last = Strategy(pp=pp, cut=cut), shape.num_layers + 1
    links_of, schedule = cut_of(strategy, shape), schedule_of(strategy, 1)
    parts: list[Counter[int | str | None]] = []
    for stage, links in enumerate(links_of):
        of = Counter[int | str | None](
            shape.window_of(link - 1) for link in links if 0 < link < last
        )
        of[_INPUTS], of[_HEAD] = int(0 in links), int(last in links)
        of[_MESSAGE] = int(stage > 0) + int(stage < len(links_of) - 1)
        parts.append(of)
    found: dict[frozenset[tuple[int | str | None, int]], _OfRank] = {}
    for rank in range(pp.degree):
        own, before = Counter[int | str | None](), Counter[int | str | None]()
        for stage in schedule.stages_of(rank):
            own.update(parts[stage])
        for stage in range(schedule.stages_of(rank)[0]):
            before.update(parts[stage])
        found[frozenset(own.items()) if rank else frozenset()] = _OfRank(own, before)
    return [*found.values()]


def _seconds(
    planned: PlannedStep, cluster: Cluster, software: Software
) -> dict[int | str | None, float]:
    """Return a lower bound of each part's seconds for one microbatch, forward and backward."""
    shape, device = planned.shape, cluster.device
    tensor = DeviceHostSeconds(_tensor_s(planned, cluster, software), 0.0)
    windows = dict.fromkeys(shape.window_of(number) for number in range(shape.num_layers))
    parts = {each: part_seconds(planned, device, software, each) for each in windows}
    any_part = next(iter(parts.values()))
    found: dict[int | str | None, float] = {
        _INPUTS: any_part.inputs.alone,
        _HEAD: any_part.head.alone,
        _MESSAGE: _message_s(planned, cluster, software),
    }
    for window, of in parts.items():
        both = DeviceHostSeconds(*map(sum, zip(of.block, of.again_and_backward, strict=True)))
        found[window] = both.with_collectives(tensor)
    return found


def _stream_bytes(planned: PlannedStep) -> float:
    """Return the bytes of one microbatch's residual on a rank, before tp splits it."""
    tokens = planned.microbatch * planned.seq_len / planned.strategy.sample_shards
    return _ITEM_BYTES * tokens * planned.shape.hidden


def _tensor_s(planned: PlannedStep, cluster: Cluster, software: Software) -> float:
    """Return a lower bound of the time of a block's tp collectives for one microbatch."""
    strategy = planned.strategy
    sent = _CALLS * _stream_bytes(planned) * (1 - 1 / strategy.tp.degree)
    group, half = network.group_of(strategy.mesh_axes(), ("tp",)), _CALLS // 2
    halves = "all_gather", "reduce_scatter"
    return sum(network.seconds(op, group, sent / 2, half, cluster, software) for op in halves)


def _message_s(planned: PlannedStep, cluster: Cluster, software: Software) -> float:
    """Return a lower bound of the time of a message between two stages."""
    strategy = planned.strategy
    sent = _stream_bytes(planned) / strategy.tp.degree
    group = network.group_of(strategy.mesh_axes(), ("pp",))
    return network.seconds("send", group, sent, 1, cluster, software)


def _sent_s(planned: PlannedStep, blocks: int, cluster: Cluster, software: Software) -> float:
    """Return a lower bound of dp and fsdp communication for the blocks of the first rank.

    zero3 gathers twice and reduces once for each microbatch; zero2 gathers once a step. Each block
    is a call of its own; the last may stay gathered for backward.
    """
    strategy, count = planned.strategy, num_parameters(planned.shape)
    of_block = (count.attention + count.mlp) / planned.shape.num_layers
    weights = _ITEM_BYTES * of_block * blocks / strategy.tp.degree
    num = planned.accumulation
    times = {"zero3": 3 * num, "zero2": 1 + num}.get(strategy.fsdp.kind, 2)
    least_s, reductions = 0.0, 1
    if strategy.fsdp.degree > 1:
        sent = times * (weights - weights / strategy.num_shards)
        calls = times * blocks - (num if strategy.fsdp.kind == "zero3" else 0)
        of = "all_gather", AXIS_SETS[SHARDS], sent, calls
        least_s, reductions = _least_s(planned, *of, cluster, software), blocks
    replicated = 2 * weights / strategy.num_shards * (1 - 1 / strategy.dp.degree)
    of = "all_reduce", ("dp",), replicated, reductions
    return least_s + _least_s(planned, *of, cluster, software)


def _least_s(
    planned: PlannedStep,
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
