"""A time that no step of a strategy is below: from its operations and its large messages.

A search prices strategies in the order of this bound, and stops where it passes the best prices:
so the bound has to be quick, and never above the price.
"""

from __future__ import annotations

from phalanx.account.parameters import num_parameters
from phalanx.comm.axes import AXIS_SETS, SHARDS
from phalanx.planner import network
from phalanx.planner.machine import Cluster
from phalanx.planner.parts import model_spent
from phalanx.planner.planned import PlannedStep
from phalanx.planner.software import Software

_ITEM_BYTES = 2
"""Of an element that is sent, at least."""

_BUBBLE = 0.9
"""The least part of the bubble of equal stages: stages are not all alike."""

_CALLS = 8
"""Gathers and scatters of tp around a block, forward and backward, at least."""


def bound_s(planned: PlannedStep, cluster: Cluster, software: Software) -> float:
    """Return the bound: of ranks that all do an average part, and of a pipeline its bubble.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    pp = planned.strategy.pp
    spent = model_spent(planned, cluster.device, software)
    device_s = spent.device + _tensor_s(planned, cluster, software)
    of_rank_s = (max(device_s, spent.host) + _messages_s(planned, cluster, software)) / pp.degree
    bubble = _BUBBLE * (pp.degree - 1) / (pp.option or 1)
    pipeline_s = of_rank_s * (planned.accumulation + bubble)
    sent_s, overlap = _sent_s(planned, cluster, software), software.overlap
    return pipeline_s + max(sent_s - overlap * pipeline_s, 0.5 * (1 - overlap) * sent_s)


def _stream_bytes(planned: PlannedStep) -> float:
    """Return the bytes of the residual of one microbatch, before tp splits it."""
    tokens = planned.microbatch * planned.seq_len / planned.strategy.sample_shards
    return _ITEM_BYTES * tokens * planned.shape.hidden


def _tensor_s(planned: PlannedStep, cluster: Cluster, software: Software) -> float:
    """Return the least time of the collectives of tp around all blocks, for one microbatch."""
    strategy, calls = planned.strategy, _CALLS * planned.shape.num_layers
    sent = calls * _stream_bytes(planned) * (1 - 1 / strategy.tp.degree)
    group = network.group_of(strategy.mesh_axes(), ("tp",))
    halves = "all_gather", "reduce_scatter"
    return sum(network.seconds(op, group, sent / 2, calls // 2, cluster, software) for op in halves)


def _messages_s(planned: PlannedStep, cluster: Cluster, software: Software) -> float:
    """Return the least time of the messages of all stages, for one microbatch."""
    strategy = planned.strategy
    calls = 2 * (strategy.pp.degree * (strategy.pp.option or 1) - 1)
    sent = calls * _stream_bytes(planned) / strategy.tp.degree
    group = network.group_of(strategy.mesh_axes(), ("pp",))
    return network.seconds("send", group, sent, calls, cluster, software)


def _sent_s(planned: PlannedStep, cluster: Cluster, software: Software) -> float:
    """Return the least time in which dp and fsdp send weights and gradients of blocks.

    zero3 gathers twice and reduces once for each microbatch, zero2 gathers once.
    """
    strategy, count = planned.strategy, num_parameters(planned.shape)
    num_layers = planned.shape.num_layers
    of_block = (count.attention + count.mlp) / num_layers
    blocks = num_layers // strategy.pp.degree
    weights = _ITEM_BYTES * of_block * blocks / strategy.tp.degree
    times = {"zero3": 3 * planned.accumulation, "zero2": 1 + planned.accumulation}
    least_s = 0.0
    if strategy.fsdp.degree > 1:
        sent = times.get(strategy.fsdp.kind, 2) * (weights - weights / strategy.num_shards)
        least_s = _least_s(planned, AXIS_SETS[SHARDS], sent, cluster, software)
    replicated = 2 * weights / strategy.num_shards * (1 - 1 / strategy.dp.degree)
    return least_s + _least_s(planned, ("dp",), replicated, cluster, software)


def _least_s(
    planned: PlannedStep, names: tuple[str, ...], sent: float, cluster: Cluster, software: Software
) -> float:
    group = network.group_of(planned.strategy.mesh_axes(), names)
    if group.size == 1:
        return 0.0
    measured = [cost.bandwidth for level in cluster.levels for cost in level.link.measured.values()]
    return sent / max(network.reach(group, cluster, software).bandwidth, *measured, 0.0)
