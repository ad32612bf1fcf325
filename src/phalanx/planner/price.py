"""The predicted time of a step of a strategy on a cluster, by cause.

The price is of the step that `train` runs: the operations of a block, counted on the meta device
(account/count.py), and the traffic, the cut and the schedule of the plan. No process is started.

    a stage     forward  = blocks x block + collectives of tp and of rings, exchanges of ep
                backward = blocks x (backward + again) + their collectives
    the step    the schedule of the pipeline with these times, messages included
                + exposed communication of dp and fsdp + the optimizer
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from phalanx.account.activations import microbatches_for_peak
from phalanx.account.planned import DecoderModel, Matrices, PlannedStep
from phalanx.account.recorder import Operation
from phalanx.comm.axes import axes_of
from phalanx.comm.ledger import Entry
from phalanx.models.block_weights import newton_schulz_flops
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.pipeline.simulate import Timeline
from phalanx.parallel.plan import Plan
from phalanx.planner import network, stages
from phalanx.planner.machine import Cluster
from phalanx.planner.parts import (
    MEMORY,
    NOTHING,
    DeviceHostSeconds,
    link_seconds,
    operation_seconds,
)
from phalanx.planner.software import Software
from phalanx.planner.stages import StageTimes
from phalanx.strategy import POSITIONS, Strategy

ADAM_WORDS = 7
"""32-bit words that AdamW reads and writes per parameter: value, gradient and two moments."""

MUON_WORDS = 10
"""32-bit words that Muon reads and writes per parameter beside its iteration: 3 for the moment, 2.5
for its direction, which has 16 bits, 2 for the decay and 2.5 for the update."""

_CALL_LAUNCHES: Final = 5
"""Host time of a tp collective, as a multiple of the launch time of an operator."""


@dataclass(frozen=True)
class Price:
    """Seconds of a step, by cause; see the drawing above.

    Attributes:
        compute_s: compute time of the busiest rank.
        tensor_s: time of tp collectives on the busiest rank, none of which is overlapped.
        ring_s: time of ring communication that attention does not overlap.
        experts_s: time in which tokens travel to the ranks of their experts and back, over ep.
        counting_s: time of forwards that only count the loads of experts, for auxiliary losses over
            the global batch (train/balance.py).
        bubble_s: time in which the busiest rank waits for other stages, messages included.
        sent_s: time of all dp and fsdp communication.
        exposed_s: part of `sent_s` that compute does not overlap.
        optimizer_s: time of the AdamW step.
        model_flops: FLOPs of the step over all ranks, with causal attention.
        full_flops: FLOPs of the step over all ranks, with full attention.
        peak_flops: total peak FLOP/s of all devices in the data type of the arithmetic.
    """

    compute_s: float
    tensor_s: float
    ring_s: float
    experts_s: float
    counting_s: float
    bubble_s: float
    sent_s: float
    exposed_s: float
    optimizer_s: float
    model_flops: float
    full_flops: float
    peak_flops: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        parts = self.compute_s, self.tensor_s, self.ring_s, self.experts_s, self.counting_s
        return sum(parts) + self.bubble_s + self.exposed_s + self.optimizer_s

    @property
    def theoretical_s(self) -> float:
        """Seconds of the step at the peak of all devices, causal attention."""
        return self.model_flops / self.peak_flops

    @property
    def mfu(self) -> float:
        """Predicted MFU with causal attention, a fraction."""
        return self.theoretical_s / self.step_s

    @property
    def mfu_full(self) -> float:
        """Predicted MFU with full attention, a fraction."""
        return self.full_flops / self.peak_flops / self.step_s


def price(step: PlannedStep[Any], cluster: Cluster, software: Software) -> Price:
    """Return the predicted price of a step.

    Raises:
        StrategyError: the strategy cannot split the model.
        ConfigError: the cluster has fewer devices than the strategy has ranks.
    """
    job = cluster.of(step.strategy.num_ranks)
    model_flops, full_flops = step.model.flops(step)
    strategy = step.strategy
    counts = step.counts_loads
    if isinstance(step.model, DecoderModel):
        step = dataclasses.replace(step, model=step.model.without_losses)
    costs = _Costs(step, job, software)
    of_stages = costs.of_stages()
    times = tuple(of.times for of in of_stages)
    busy = [of_stages[stage] for stage in stages.busiest(times, costs.schedule)]
    num = step.accumulation
    compute_s = num * sum(of.times.forward + of.times.backward for of in busy)
    tensor_s = num * sum(of.tensor_s for of in busy)
    ring_s = num * sum(of.ring_s for of in busy)
    experts_s = num * sum(of.experts_s for of in busy)
    around_s = tensor_s + ring_s + experts_s
    pipeline_s = compute_s
    if strategy.pp.degree > 1:
        pipeline_s = stages.step_s(strategy, num, times)
    # Compute hides at most the part `overlap` of its own time, and (1 - overlap) / 2 of the
    # communication stays exposed, however long compute takes:
    #
    #     compute    |-- forward --|---------- backward ----------|
    #     dp, fsdp            |== hidden: overlap x compute ==|=== exposed ===|
    sent_s = costs.sent_s()
    hidden_s = min(software.overlap * (compute_s - around_s), sent_s)
    exposed_s = max(sent_s - hidden_s, 0.5 * (1 - software.overlap) * sent_s)
    if job.device.core is not None:  # on CPU, the same cores send and compute
        exposed_s = sent_s
    # The bubble is the step of the pipeline less the work of its busiest rank:
    #
    #     rank 0    F F F F . . B B B B         pipeline_s: all ten columns
    #     rank 1    . F F F F B B B B .         compute_s of the busiest rank: 4 F + 4 B
    #
    # On shared cores (share < 1) the busiest rank's own work takes 1 / share as long, which already
    # fills a part of these gaps, so only the remainder counts as a bubble.
    # Ranks that share a core take turns: a rank that waits for a stage leaves its turns to others.
    share = min(1.0, job.device.cores)
    alone_s = compute_s - around_s
    bubble_s = max(0.0, pipeline_s - compute_s - (1 / share - 1) * alone_s)
    return Price(
        compute_s=alone_s / share,
        tensor_s=tensor_s,
        ring_s=ring_s,
        experts_s=experts_s,
        counting_s=costs.forwards_s(times) / share if counts else 0.0,
        bubble_s=bubble_s,
        sent_s=sent_s,
        exposed_s=exposed_s,
        optimizer_s=costs.optimizer_s() / share,
        model_flops=model_flops,
        full_flops=full_flops,
        peak_flops=job.num_devices * job.device.peak(step.precision),
    )


@dataclass(frozen=True)
class StageCost:
    """Seconds of a stage for one microbatch, and communication of tp, rings and ep among them."""

    times: StageTimes
    tensor_s: float
    ring_s: float
    experts_s: float


class _AroundBlock(NamedTuple):
    """Communication of one block: added to forward, added to backward, and seconds by axis."""

    forward: DeviceHostSeconds
    backward: DeviceHostSeconds
    tensor_s: float
    ring_s: float


class _Exchange(NamedTuple):
    """Seconds of the exchange of one block's rows over ep, for one microbatch."""

    forward: float
    backward: float


class _Traffic(NamedTuple):
    """Traffic of a pipeline rank: of a step of one microbatch, and of each further microbatch."""

    one: list[Entry]
    further: list[Entry]


def _traffic(plan: Plan[Any], size: tuple[int, int]) -> _Traffic:
    """Return the traffic of the plan's rank, for microbatches of (rows, positions)."""
    # Two steps separate traffic of a step (gathers before forward, the last reduction) from
    # traffic that each further microbatch adds:
    #
    #     one microbatch      once + per
    #     two microbatches    once + 2 per
    one, two = plan.traffic([size]), plan.traffic([size] * 2)
    before = {(e.phase, e.axis, e.op): e for e in one}
    further: list[Entry] = []
    for each in two:
        if (less := before.get((each.phase, each.axis, each.op))) is not None:
            names = ("calls", "payload_bytes", "sent_bytes")
            more = {name: getattr(each, name) - getattr(less, name) for name in names}
            each = dataclasses.replace(each, **more)
        further.append(each)
    return _Traffic(one, further)


class _Costs:
    """Times of the parts of one planned step: stages, dp and fsdp communication, optimizer."""

    def __init__(self, step: PlannedStep[Any], job: Cluster, software: Software) -> None:
        self.step, self.job, self.software, self.plan = step, job, software, step.plan
        num_rounds = microbatches_for_peak(step.strategy, step.accumulation)
        self.schedule: Schedule | None = self.plan.schedule(num_rounds)
        size = (step.microbatch, step.seq_len)
        self.first = self.most = _traffic(self.plan, size)
        self.plans, self.num_sparse = [self.plan], 0
        if isinstance(step.model, DecoderModel) and step.model.shape.experts is not None:
            most, self.num_sparse = stages.with_most_experts(self.plan, step.model.shape)
            if most is not self.plan:
                self.plans.append(most)
                self.most = _traffic(most, size)

    def of_stages(self) -> list[StageCost]:
        """Return the times of each pipeline stage; one stage without pp."""
        links = link_seconds(self.step, self.job.device, self.software)
        blocks = [link for link in links if link.is_block]
        cut = self.plan.cut or [range(len(links))]
        of_first = (0,) if self.schedule is None else self.schedule.stages_of(0)
        num_blocks = sum(links[at].is_block for stage in of_first for at in cut[stage])
        # With windows of several kinds, the ring hides behind the cheapest attention: a bound from
        # above of the exposed time that needs no time of its own for each kind.
        attention_s = min((link.attention for link in blocks), default=0.0)
        around = self._around_block(attention_s, num_blocks)
        exchange = self._exchange()
        group = network.group_of(self.step.strategy.mesh_axes(), ("pp",))
        stages: list[StageCost] = []
        for stage in cut:
            of_stage = [links[at] for at in stage]
            within = [link for link in of_stage if link.is_block]
            others = [link for link in of_stage if not link.is_block]
            forward = sum(link.forward.with_collectives(around.forward) for link in within)
            backward = sum(link.backward.with_collectives(around.backward) for link in within)
            num_sparse = sum(link.has_experts for link in within)
            forward += num_sparse * exchange.forward
            backward += num_sparse * exchange.backward
            forward = sum((link.forward.alone for link in others), start=forward)
            backward = sum((link.backward.alone for link in others), start=backward)
            if (sent := of_stage[-1].sent_bytes) is None:
                message_s = self._message_s
            else:
                message_s = network.seconds("send", group, sent, 1, self.job, self.software)
            times = StageTimes(forward, backward, message_s)
            num = len(within)
            of_experts_s = num_sparse * (exchange.forward + exchange.backward)
            of = num * around.tensor_s, num * around.ring_s, of_experts_s
            stages.append(StageCost(times, *of))
        return stages

    def _around_block(self, attention_s: float, num_blocks: int) -> _AroundBlock:
        """Return the communication of one block for one microbatch: tp collectives and the ring.

        The plan's traffic is of the first pipeline rank, which has `num_blocks`.
        """
        num_blocks = max(1, num_blocks)
        tensor = {name: NOTHING for name in ("forward", "backward")}
        ring_s = 0.0
        host_call_s = tensor_host_s(self.step.strategy, self.job, self.software)
        for entry in self.first.further:
            if entry.axis.startswith("tp") and entry.phase in tensor:
                device, host = tensor[entry.phase]
                device += self._entry_s(entry) / num_blocks
                host += entry.calls * host_call_s / num_blocks
                tensor[entry.phase] = DeviceHostSeconds(device, host)
            elif entry.axis == POSITIONS and entry.phase != "agree" and not _is_of_data(entry):
                ring_s += self._entry_s(entry) / num_blocks
        # Attention overlaps ring communication, except on CPU, where the same cores do both.
        ring_s = max(0.0, ring_s - (attention_s if self.job.device.core is None else 0.0))
        forward, backward = (
            DeviceHostSeconds(of.device + ring_s / 2, of.host) for of in tensor.values()
        )
        return _AroundBlock(forward, backward, sum(of.device for of in tensor.values()), ring_s)

    def _exchange(self) -> _Exchange:
        """Return the seconds in which ep sends rows of one block there and back, a microbatch.

        The plan's traffic has the expected bytes: of the rows that a rank selects, the part
        (ep - 1) / ep leaves the rank. The busiest rank receives `imbalance` times as many, and
        its peers wait for it. Ranks of tp have equal rows: a program that sends rows once sends a
        part from each. Compute does not hide the exchange. The first pipeline rank may have no
        block with experts, so the traffic is of the rank with the most, `num_sparse`.
        """
        if not self.num_sparse:
            return _Exchange(0.0, 0.0)
        model: DecoderModel = self.step.model
        assert model.shape.experts is not None
        copies = model.shape.experts.top_k
        of = {
            name: sum(
                self._entry_s(entry, copies)
                for entry in self.most.further
                if entry.axis == "ep" and entry.phase == name and not _is_of_data(entry)
            )
            for name in ("forward", "backward")
        }
        each = model.imbalance / self.num_sparse
        if self.software.sends_rows_once:
            each /= self.step.strategy.tp.degree
        return _Exchange(of["forward"] * each, of["backward"] * each)

    def _entry_s(self, entry: Entry, copies: int = 1) -> float:
        strategy = self.step.strategy
        axes = strategy.mesh_axes()
        group = network.group_of(axes, axes_of(entry.axis, axes))
        of = entry.op, group, entry.sent_bytes, entry.calls
        return network.seconds(*of, self.job, self.software, copies)

    @functools.cached_property
    def _message_s(self) -> float:
        """Seconds of one message between stages."""
        strategy = self.step.strategy
        sent = [e for e in self.first.further if e.axis == "pp" and e.op == "send" and e.calls]
        if not sent:
            return 0.0
        # Megatron's ranks of tp have equal activations: with `sends_parts` each sends its part, and
        # the receiving stage gathers the parts over its own, faster, tp links.
        each_bytes = sum(e.sent_bytes for e in sent) / sum(e.calls for e in sent)
        if self.software.sends_parts and strategy.tp.kind == "megatron":
            each_bytes /= strategy.tp.degree
        axes = strategy.mesh_axes()
        group = network.group_of(axes, ("pp",))
        late_s = network.reach(group, self.job, self.software).late_s
        return late_s + network.seconds("send", group, each_bytes, 1, self.job, self.software)

    def sent_s(self) -> float:
        """Return the time of all gradient and weight communication of a step over dp and fsdp.

        It is the longer of the first pipeline rank's and of the rank's with the most experts.
        """
        times: list[float] = []
        for of in (self.first, self.most):
            per = sum(self._entry_s(e) for e in of.further if _is_of_data(e))
            once = sum(self._entry_s(e) for e in of.one if _is_of_data(e))
            times.append(max(0.0, once - per) + per * self.step.accumulation)
        return max(times)

    def forwards_s(self, times: Sequence[StageTimes]) -> float:
        """Return the time of forwards of all microbatches alone, without gradients."""
        # Each stage runs its microbatches one after another, and the slowest rank sets the pace:
        #
        #     stage 0    F F F F
        #     stage 1      F F F F        one forward of all stages, then more of the slowest
        num = self.step.accumulation
        all_s = sum(of.forward + of.message for of in times)
        ranks = [(0,)]
        if self.schedule is not None:
            ranks = [self.schedule.stages_of(rank) for rank in range(len(self.schedule.orders))]
        pace_s = max(sum(times[stage].forward for stage in of_rank) for of_rank in ranks)
        gathered_s = max(
            sum(self._entry_s(e) for e in of.further if _is_of_data(e) and e.phase == "forward")
            for of in (self.first, self.most)
        )
        return max(all_s + (num - 1) * pace_s, num * gathered_s)

    def optimizer_s(self) -> float:
        """Return the time of the optimizer's step: elementwise, bound by memory bandwidth.

        Muon's owners orthogonalize the matrices of a stage, with even work, and each matrix moves
        to its owner and back once (parallel/whole_matrix.py).
        """
        held = max(plan.holds(self.step.accumulation).optimizer_bytes for plan in self.plans)
        num_bytes = ADAM_WORDS * (held // 2)  # bytes of trained parameters
        step, device, muon_s = self.step, self.job.device, 0.0
        model = step.model
        if isinstance(model, DecoderModel) and (matrices := model.muon_matrices(step, 0)):
            num_bytes += int((MUON_WORDS - ADAM_WORDS) * sum(of.shard_bytes for of in matrices))
            muon_s = self._muon_s(matrices)
        if device.core is not None:
            return muon_s + num_bytes * min(1.0, device.cores) / device.bandwidth
        return muon_s + num_bytes / (device.bandwidth * MEMORY)

    def _muon_s(self, matrices: Sequence[Matrices]) -> float:
        """Return the seconds of Newton-Schulz of the busiest owner, and of the moves to it."""
        strategy, device = self.step.strategy, self.job.device
        precision, each = self.step.precision, list[float]()
        for (rows, columns), *_ in matrices:
            narrow, wide = sorted((rows, columns))
            sizes, flops = (narrow, narrow, wide), int(newton_schulz_flops((rows, columns)))
            product = Operation("addmm", flops, 0, sizes)
            each.append(operation_seconds([product], device, self.software, precision)[0])
        num_owners = strategy.num_ranks // strategy.pp.degree
        all_s = sum(of.number * one_s for of, one_s in zip(matrices, each, strict=True))
        seconds = max(all_s / num_owners, *each)
        # A rank sends the shards that it does not own, and as an owner all other ranks' shards:
        #
        #     fsdp, tp    (N - 1) / N of its shards to owners, and as many bytes back
        #     dp          nothing to owners, and as an owner (N - 1) / N of the whole to copies
        axes, shards = strategy.mesh_axes(), sum(of.shard_bytes for of in matrices) / 2  # 16 bits
        for name, degree in axes.items():
            if name == "pp":
                continue
            times = 1 if name == "dp" else 2
            sent, group = times * shards * (degree - 1) / degree, network.group_of(axes, (name,))
            seconds += network.seconds("all_to_all", group, sent, times, self.job, self.software)
        return seconds


def tensor_host_s(strategy: Strategy, job: Cluster, software: Software) -> float:
    """Return the host seconds of one tp collective."""
    is_between = strategy.pp.degree > 1 and network.num_units(job) > 1
    entered_s = software.entry_s * strategy.tp.degree if is_between else 0.0
    return _CALL_LAUNCHES * software.launch_s + entered_s


def _is_of_data(entry: Entry) -> bool:
    """Return whether gradients or weights are sent, also summed over other axes alone."""
    axes = {*entry.axis.split("_")}
    sums = entry.op == "all_reduce" and not axes.isdisjoint((POSITIONS, "ep"))
    return (sums or not axes.isdisjoint(("dp", "fsdp"))) and entry.phase != "agree"


def timeline(step: PlannedStep[Any], cluster: Cluster, software: Software) -> Timeline | None:
    """Return the predicted timeline of all pipeline ranks, in seconds; None without a pipeline.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    strategy = step.strategy
    if strategy.pp.degree == 1:
        return None
    job = cluster.of(strategy.num_ranks)
    of_stages = _Costs(step, job, software).of_stages()
    return stages.timeline(strategy, step.accumulation, tuple(of.times for of in of_stages))
