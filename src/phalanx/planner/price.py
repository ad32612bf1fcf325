"""What a step of a strategy costs on a cluster: time by cause, and memory by cause and stage.

It prices what `train` runs: the operations of a block, counted on the meta device
(account/work.py), the traffic of the plan, its cut and its schedule. No process is started.

    a stage     forward  = blocks x block + collectives of tp and of rings
                backward = blocks x (backward + again) + their collectives
    the step    the schedule of the pipeline with these times, messages included
                + what dp and fsdp send beyond what compute hides + the optimizer
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.account.flops import step_flops
from phalanx.comm.axes import axes_of
from phalanx.comm.ledger import Entry
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.pipeline.simulate import Timeline
from phalanx.planner import network, roofline, stages
from phalanx.planner.machine import Cluster
from phalanx.planner.parts import PartSeconds, part_seconds
from phalanx.planner.planned import PlannedStep, plan_of
from phalanx.planner.software import Software
from phalanx.planner.stages import StageTimes

_ADAM_BYTES = 7
"""Words of 32 bits that AdamW reads and writes of a parameter: it, its gradient and two moments."""


@dataclass(frozen=True)
class Price:
    """Seconds of a step, by cause; see the drawing above.

    Attributes:
        compute_s: of the operations of the busiest rank.
        tensor_s: collectives of tp on that rank, which nothing hides.
        ring_s: what a ring of positions sends beyond what attention hides.
        bubble_s: in which that rank waits for other stages, messages included.
        sent_s: what dp and fsdp send in all.
        exposed_s: the part of it that compute does not hide.
        optimizer_s: of the step of AdamW.
        model_flops: of the step of the whole job, attention causal.
        full_flops: the same with full attention.
        peak_flops: of all devices, in a second.
    """

    compute_s: float
    tensor_s: float
    ring_s: float
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
        parts = self.compute_s, self.tensor_s, self.ring_s, self.bubble_s
        return sum(parts) + self.exposed_s + self.optimizer_s

    @property
    def theoretical_s(self) -> float:
        """Model FLOPs over the peak of all devices."""
        return self.model_flops / self.peak_flops

    @property
    def mfu(self) -> float:
        """Model FLOPs of causal attention over peak."""
        return self.theoretical_s / self.step_s

    @property
    def mfu_full(self) -> float:
        """The same, with full attention counted."""
        return self.full_flops / self.peak_flops / self.step_s


def price(planned: PlannedStep, cluster: Cluster, software: Software) -> Price:
    """Price a step.

    Raises:
        StrategyError: the strategy does not split the model.
        ConfigError: the cluster has fewer devices.
    """
    strategy, shape = planned.strategy, planned.shape
    job = cluster.of(strategy.num_ranks)
    costs = _Costs(planned, job, software)
    times = costs.of_stages()
    pp = strategy.pp.degree
    busy = stages.busiest(times, costs.schedule)
    compute_s = planned.accumulation * sum(times[s].forward + times[s].backward for s in busy)
    of_axes = [costs.per_stage[s] for s in busy]
    tensor_s = planned.accumulation * sum(each.tensor_s for each in of_axes)
    ring_s = planned.accumulation * sum(each.ring_s for each in of_axes)
    pipeline_s = (
        compute_s if pp == 1 else stages.step_s(strategy, planned.accumulation, tuple(times))
    )
    sent_s = costs.sent_s()
    hidden_s = min(software.overlap * (compute_s - tensor_s - ring_s), sent_s)
    flops = {
        kind: step_flops(shape, planned.seq_len, planned.num_sequences, kind).model
        for kind in ("causal", "full")
    }
    return Price(
        compute_s=compute_s - tensor_s - ring_s,
        tensor_s=tensor_s,
        ring_s=ring_s,
        bubble_s=max(0.0, pipeline_s - compute_s),
        sent_s=sent_s,
        exposed_s=max(sent_s - hidden_s, 0.5 * (1 - software.overlap) * sent_s),
        optimizer_s=costs.optimizer_s(),
        model_flops=flops["causal"],
        full_flops=flops["full"],
        peak_flops=job.totals.flops,
    )


@dataclass(frozen=True)
class _OfStage:
    compute_forward_s: float
    compute_backward_s: float
    tensor_s: float
    ring_s: float
    message_s: float


class _Costs:
    """The times of the parts of one planned."""

    def __init__(self, planned: PlannedStep, job: Cluster, software: Software) -> None:
        self._planned, self._job, self._software = planned, job, software
        self.plan = plan_of(planned)
        self.schedule: Schedule | None = self.plan.schedule(planned.accumulation)
        self.per_stage: list[_OfStage] = []
        self._attention_s = 0.0

    def of_stages(self) -> list[StageTimes]:
        """Return the times of each stage of the pipeline, or of the one there is."""
        planned = self._planned
        shape, last = planned.shape, planned.shape.num_layers + 1
        windows = {shape.window_of(number) for number in range(shape.num_layers)}
        device, software = self._job.device, self._software
        parts = {each: part_seconds(planned, device, software, each) for each in windows}
        self._attention_s = min(of.attention for of in parts.values())
        times: list[StageTimes] = []
        for links in self.plan.cut or [range(last + 1)]:
            self.per_stage.append(self._of_stage(links, parts))
            of = self.per_stage[-1]
            comm_s = of.tensor_s + of.ring_s
            forward_part = comm_s / 2 if planned.strategy.recompute.kind == "none" else comm_s / 3
            times.append(
                StageTimes(
                    of.compute_forward_s + forward_part,
                    of.compute_backward_s + comm_s - forward_part,
                    of.message_s,
                )
            )
        return times

    def _of_stage(self, links: Iterable[int], parts: dict[int | None, PartSeconds]) -> _OfStage:
        shape, last = self._planned.shape, self._planned.shape.num_layers + 1
        forward = backward = 0.0
        blocks = 0
        any_part = next(iter(parts.values()))
        for link in links:
            if link == 0:
                forward += any_part.inputs
            elif link == last:  # the loss makes its gradients with it
                forward += any_part.head
            else:
                of = parts[shape.window_of(link - 1)]
                forward += of.block
                backward += of.backward + of.again
                blocks += 1
        tensor_s, ring_s = (blocks * seconds for seconds in self._of_axes)
        return _OfStage(forward, backward, tensor_s, ring_s, self._message_s)

    @functools.cached_property
    def _of_axes(self) -> tuple[float, float]:
        """Seconds around one block, for one microbatch: of tp's collectives and of a ring."""
        num_blocks = max(1, self._blocks_of_first)
        tensor_s = sum(self._entry_s(e) for e in self._of_microbatch if e.axis.startswith("tp"))
        sent_s = sum(self._entry_s(e) for e in self._of_microbatch if _is_of_ring(e))
        # What a ring sends travels while attention computes.
        return tensor_s / num_blocks, max(0.0, sent_s / num_blocks - self._attention_s)

    @functools.cached_property
    def _blocks_of_first(self) -> int:
        """Blocks on the first rank of the pipeline, whose traffic the plan states."""
        last = self._planned.shape.num_layers + 1
        if self.plan.cut is None or self.schedule is None:
            return last - 1
        stages = self.schedule.stages_of(0)
        return sum(0 < link < last for stage in stages for link in self.plan.cut[stage])

    @functools.cached_property
    def _traffic(self) -> tuple[list[Entry], list[Entry]]:
        """The traffic of a step of one microbatch, and of a step of two."""
        size = (self._planned.microbatch, self._planned.seq_len)
        return self.plan.traffic([size]), self.plan.traffic([size] * 2)

    @functools.cached_property
    def _of_microbatch(self) -> list[Entry]:
        """What each microbatch adds."""
        one, two = self._traffic
        before = {(e.phase, e.axis, e.op): e for e in one}
        return [_less(each, before.get((each.phase, each.axis, each.op))) for each in two]

    def _entry_s(self, entry: Entry) -> float:
        strategy = self._planned.strategy
        axes = strategy.mesh_axes()
        group = network.group_of(axes, axes_of(entry.axis, axes))
        calls = float(entry.calls)
        if entry.op == "send":  # to a neighbour: one hop
            calls /= max(1.0, math.log2(group.size))
        return network.seconds(group, entry.sent_bytes, calls, self._job, self._software)

    @functools.cached_property
    def _message_s(self) -> float:
        """The time of one message between stages."""
        strategy = self._planned.strategy
        sent = [e for e in self._of_microbatch if e.axis == "pp" and e.op == "send" and e.calls]
        if not sent:
            return 0.0
        each_bytes = sum(e.sent_bytes for e in sent) / sum(e.calls for e in sent)
        if self._software.sends_parts:
            each_bytes /= strategy.tp.degree
        axes = strategy.mesh_axes()
        group = network.group_of(axes, ("pp",))
        return network.seconds(group, each_bytes, 1, self._job, self._software)

    def sent_s(self) -> float:
        """Return the time in which the step sends gradients and weights, over dp and fsdp."""
        per = sum(self._entry_s(e) for e in self._of_microbatch if _is_of_data(e))
        once = sum(self._entry_s(e) for e in self._traffic[0] if _is_of_data(e))
        return max(0.0, once - per) + per * self._planned.accumulation

    def optimizer_s(self) -> float:
        """Return the time of the step of AdamW, which memory bounds."""
        held = self.plan.holds(self._planned.accumulation)
        words = _ADAM_BYTES * held.parameter_bytes
        return words / (self._job.device.bandwidth * roofline.MEMORY)


def _is_of_data(entry: Entry) -> bool:
    return bool({"dp", "fsdp"} & {*entry.axis.split("_")}) and entry.phase != "agree"


def _is_of_ring(entry: Entry) -> bool:
    is_other = _is_of_data(entry) or entry.axis == "pp" or entry.axis.startswith("tp")
    return not is_other and entry.phase != "agree"


def _less(entry: Entry, other: Entry | None) -> Entry:
    if other is None:
        return entry
    return dataclasses.replace(
        entry,
        calls=entry.calls - other.calls,
        payload_bytes=entry.payload_bytes - other.payload_bytes,
        sent_bytes=entry.sent_bytes - other.sent_bytes,
    )


def timeline(planned: PlannedStep, cluster: Cluster, software: Software) -> Timeline | None:
    """Return when each rank of the pipeline does what, in seconds; None without one.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    strategy = planned.strategy
    if strategy.pp.degree == 1:
        return None
    times = tuple(_Costs(planned, cluster.of(strategy.num_ranks), software).of_stages())
    return stages.timeline(strategy, planned.accumulation, times)
