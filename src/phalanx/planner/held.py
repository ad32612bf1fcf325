"""What each stage of a strategy holds on a device, by cause.

    weights       this rank's shard, 32 bits
    gathered      parameters gathered from other ranks, at most at one time
    gradients     from microbatch to microbatch, and those not yet reduced
    optimizer     the two moments of AdamW
    casts         weights in the type of the arithmetic, where each block makes its own
    activations   of the microbatches in flight, what backward makes again, and what passes
    logits        what the loss has at hand beside, on the last stage
    margin        of a GPU: libraries, buffers of collectives, and what the allocator cannot use

All but the last are the plan's own (`Plan.holds`) and the account's (account/activations.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from phalanx.account.activations import Activations, activations, held_by
from phalanx.measure.memory import Kind
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.plan import Plan
from phalanx.parallel.reduce import BUCKET_BYTES
from phalanx.parallel.split import StateBytes
from phalanx.planner.machine import Device
from phalanx.planner.planned import PlannedStep, plan_of
from phalanx.planner.software import DEFAULT, Software
from phalanx.planner.stages import rounds
from phalanx.strategy import Strategy

_LIBRARIES_BYTES: Final = 1 << 30
"""CUDA's context, kernels and workspaces of matrix products."""

_BUFFERS_BYTES: Final = 256 << 20
"""Of NCCL, for each axis that communicates."""

_UNUSABLE: Final = 0.04
"""Part of allocated memory that falls between blocks of the allocator."""

MOST_ACTIVATIONS, ALL_GRADIENTS = "with the most activations", "with all gradients"
"""The moments at which a rank may hold the most."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank of one stage holds of each cause at the most; see above.

    Gradients come as activations go, so a rank holds the most of all causes together at one of two
    moments: with the most activations, or with all gradients.

    Attributes:
        early: bytes of the gradients that are there when activations are the most; all where
            microbatches are accumulated, none or a first bucket where not.
    """

    stage: int
    weights: int
    gathered: int
    gradients: int
    optimizer: int
    casts: int
    activations: int
    logits: int
    margin: int
    early: int = 0

    @property
    def total(self) -> int:
        """What it holds at its peak."""
        return sum(self.at_peak().values())

    @property
    def moment(self) -> str:
        """When its peak is."""
        passing = self.casts + self.activations + self.logits
        return ALL_GRADIENTS if self.gradients - self.early > passing else MOST_ACTIVATIONS

    def at_peak(self) -> dict[str, int]:
        """Return bytes by cause at the moment of the peak, in printed order."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("stage", "early")]
        gone = dict.fromkeys(("casts", "activations", "logits"), 0)
        other = gone if self.moment == ALL_GRADIENTS else {"gradients": self.early}
        return {name: getattr(self, name) for name in names} | other

    def kinds(self) -> dict[Kind, int]:
        """Return bytes at the most by the kinds that the memory of a run is measured by."""
        return _kinds({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def kinds_at_peak(self) -> dict[Kind, int]:
        """Return bytes at the moment of the peak by the same kinds."""
        return _kinds(self.at_peak())


def _kinds(causes: Mapping[str, int]) -> dict[Kind, int]:
    return {
        "parameters": causes["weights"],
        "gathered": causes["gathered"],
        "cast": causes["casts"],
        "gradients": causes["gradients"],
        "optimizer": causes["optimizer"],
        "activations": causes["activations"] + causes["logits"],
    }


@functools.singledispatch
def memory(planned: PlannedStep, device: Device, software: Software = DEFAULT) -> list[Memory]:
    """Return what the ranks of each coordinate on pp hold; of a module by any_module.py.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    strategy, shape = planned.strategy, planned.shape
    plan = plan_of(planned)
    where = "cpu" if device.kind == "cpu" else "cuda"
    of_one, uncast = (_activations(planned, where, software, casts) for casts in (None, False))
    schedule = plan.schedule(rounds(planned.strategy, planned.accumulation))
    found: list[Memory] = []
    alike: dict[tuple[tuple[int, bool, bool], ...], StateBytes] = {}
    for pp_rank in range(strategy.pp.degree):
        held = _held(plan, planned, schedule, pp_rank, alike)
        at = shape.num_layers, plan.cut, schedule, pp_rank
        most, without_casts, without_logits = (
            held_by(of, *at)
            for of in (of_one, uncast, dataclasses.replace(uncast, head_at_work=uncast.head))
        )
        logits = without_casts - without_logits
        of_head = min(logits, _head_cast_bytes(planned))
        casts_in_backward = of_one.block_at_work - uncast.block_at_work
        causes = {
            "weights": held.parameter_bytes,
            "gathered": held.gathered_bytes,
            "gradients": _gradient_bytes(planned, held),
            "optimizer": held.optimizer_bytes,
            "casts": max(most - without_casts + of_head, casts_in_backward),
            "activations": without_logits,
            "logits": logits - of_head,
        }
        beside = margin(strategy, sum(causes.values())) if device.kind == "gpu" else 0
        early = early_bytes(strategy, planned.accumulation, causes["gradients"])
        found.append(Memory(stage=pp_rank, margin=beside, early=early, **causes))
    return found


def early_bytes(strategy: Strategy, accumulation: int, gradient_bytes: int) -> int:
    """Return the bytes of the gradients that are there when activations are the most."""
    if accumulation > 1:
        return gradient_bytes
    has_buckets = strategy.fsdp.degree == 1 < strategy.dp.degree * strategy.sample_shards
    return min(gradient_bytes, BUCKET_BYTES if has_buckets else 0)


def _activations(
    planned: PlannedStep, where: Literal["cpu", "cuda"], software: Software, casts: bool | None
) -> Activations:
    """Return the activations of a program, which may keep more in blocks, and of its logits."""
    strategy = planned.strategy
    of = activations(
        *(planned.shape, strategy, planned.seq_len, planned.microbatch, planned.precision),
        device=where,
        has_documents=planned.has_documents,
        has_casts=casts,
    )
    scale, head = software.kept, of.head_at_work
    if software.logit_bytes:
        tokens = planned.microbatch * planned.seq_len // strategy.sample_shards
        vocabulary = planned.shape.vocab_size // strategy.tp.degree
        head = of.head + tokens * vocabulary * software.logit_bytes
    blocks, recomputed = int(of.blocks * scale), int(of.recomputed * scale)
    return dataclasses.replace(of, blocks=blocks, recomputed=recomputed, head_at_work=head)


def _gradient_bytes(planned: PlannedStep, held: StateBytes) -> int:
    """Return the bytes of gradients at the most.

    Of one microbatch the gradient of a tied embedding is none until the last block's are reduced:
    what the head has made of it counts as an activation (`Activations.tied`).
    """
    num_bytes = held.gradient_bytes + held.unreduced_bytes
    strategy, shape = planned.strategy, planned.shape
    if not shape.tied or planned.accumulation > 1 or strategy.fsdp.degree == 1:
        return num_bytes
    tied = shape.vocab_size * shape.hidden * 4 // strategy.tp.degree
    at_end = held.gradient_bytes + tied - tied // strategy.num_shards
    return min(num_bytes, max(num_bytes - tied, at_end))


def _head_cast_bytes(planned: PlannedStep) -> int:
    """Return the bytes of the output projection, which the loss casts; fsdp gathers it cast."""
    dtype: torch.dtype = getattr(torch, planned.precision)
    shape, tp = planned.shape, planned.strategy.tp.degree
    return shape.vocab_size * shape.hidden * dtype.itemsize // tp if dtype.itemsize < 4 else 0


def _held(
    plan: Plan[Any],
    planned: PlannedStep,
    schedule: Schedule | None,
    pp_rank: int,
    alike: dict[tuple[tuple[int, bool, bool], ...], StateBytes],
) -> StateBytes:
    """Return what a rank holds of the trained state; ranks of as many blocks hold the same."""
    if plan.cut is None or schedule is None:
        return plan.holds(planned.accumulation)
    last = planned.shape.num_layers + 1
    cuts = [plan.cut[stage] for stage in schedule.stages_of(pp_rank)]
    key = tuple((len(links), 0 in links, last in links) for links in cuts)
    if key not in alike:
        alike[key] = plan.of(pp_rank).holds(planned.accumulation)
    return alike[key]


def heaviest(stages: list[Memory]) -> Memory:
    """Return the stage that holds the most."""
    return max(stages, key=lambda each: each.total)


def of_libraries(strategy: Strategy) -> int:
    """Return the bytes that libraries take beside the allocator of PyTorch."""
    axes = sum(degree > 1 for degree in strategy.mesh_axes().values())
    return _LIBRARIES_BYTES + axes * _BUFFERS_BYTES


def margin(strategy: Strategy, num_bytes: int) -> int:
    """Return what a GPU must have beside the bytes that a rank holds."""
    return of_libraries(strategy) + int(_UNUSABLE * num_bytes)
