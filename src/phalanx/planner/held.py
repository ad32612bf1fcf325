"""What each stage of a strategy holds on a device, by cause.

    weights       this rank's shard, 32 bits
    gathered      parameters gathered from other ranks, at most at one time
    gradients     from microbatch to microbatch, and those not yet reduced
    optimizer     the two moments of AdamW
    activations   of the microbatches in flight, and what backward makes again
    logits        of the chunk that the loss has at hand, on the last stage
    margin        the libraries, buffers of collectives, and what the allocator cannot use

The first five are the plan's own (`Plan.holds`) and the account's (account/activations.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import torch

from phalanx.account.activations import Activations, activations, held_by
from phalanx.models.loss import chunk_rows
from phalanx.parallel.plan import Plan
from phalanx.parallel.split import StateBytes
from phalanx.planner.machine import Device
from phalanx.planner.planned import PlannedStep, plan_of
from phalanx.planner.software import DEFAULT, Software

_LIBRARIES_BYTES: Final = 1 << 30
"""CUDA's context, kernels and workspaces of matrix products."""

_BUFFERS_BYTES: Final = 256 << 20
"""Of NCCL, for each axis that communicates."""

_UNUSABLE: Final = 0.04
"""Part of allocated memory that falls between blocks of the allocator."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank of one stage holds at its peak, by cause; see above."""

    stage: int
    weights: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    margin: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.causes().values())

    def causes(self) -> dict[str, int]:
        """Return bytes by cause, in the order in which they are printed."""
        return {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "stage"
        }


def memory(planned: PlannedStep, device: Device, software: Software = DEFAULT) -> list[Memory]:
    """Return what the ranks of each coordinate on pp hold.

    Raises:
        StrategyError: the strategy does not split the model.
    """
    strategy, shape = planned.strategy, planned.shape
    plan = plan_of(planned)
    where = "cpu" if device.kind == "cpu" else "cuda"
    of_one = activations(
        *(shape, strategy, planned.seq_len, planned.microbatch, planned.precision),
        device=where,
        has_documents=planned.has_documents,
    )
    schedule = plan.schedule(planned.accumulation)
    found: list[Memory] = []
    alike: dict[tuple[tuple[int, bool, bool], ...], StateBytes] = {}
    kept = _kept(of_one, software.kept)
    for pp_rank in range(strategy.pp.degree):
        held = _held(plan, planned, pp_rank, alike)
        is_last = plan.cut is None or schedule is None
        if plan.cut is not None and schedule is not None:
            is_last = len(plan.cut) - 1 in schedule.stages_of(pp_rank)
        causes = {
            "weights": held.parameter_bytes,
            "gathered": held.gathered_bytes,
            "gradients": held.gradient_bytes + held.unreduced_bytes,
            "optimizer": held.optimizer_bytes,
            "activations": held_by(kept, shape.num_layers, plan.cut, schedule, pp_rank),
            "logits": _logits_bytes(planned, where, software.logit_bytes) if is_last else 0,
        }
        margin = _margin(planned, sum(causes.values())) if where == "cuda" else 0
        found.append(Memory(stage=pp_rank, margin=margin, **causes))
    return found


def _kept(of: Activations, scale: float) -> Activations:
    """Return the activations of a program that keeps `scale` times as much in its blocks."""
    blocks, recomputed = int(of.blocks * scale), int(of.recomputed * scale)
    return dataclasses.replace(of, blocks=blocks, recomputed=recomputed)


def _held(
    plan: Plan[Any],
    planned: PlannedStep,
    pp_rank: int,
    alike: dict[tuple[tuple[int, bool, bool], ...], StateBytes],
) -> StateBytes:
    """Return what a rank holds of the trained state; ranks of as many blocks hold the same."""
    schedule = plan.schedule(planned.accumulation)
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


def _logits_bytes(planned: PlannedStep, where: str, each_bytes: int) -> int:
    dtype: torch.dtype = getattr(torch, planned.precision)
    vocabulary = planned.shape.vocab_size // planned.strategy.tp.degree
    tokens = planned.microbatch * planned.seq_len // planned.strategy.sample_shards
    if each_bytes:
        return tokens * vocabulary * each_bytes
    rows = min(tokens, chunk_rows(vocabulary, dtype, where))
    return rows * vocabulary * dtype.itemsize


def of_libraries(planned: PlannedStep) -> int:
    """Return the bytes that libraries take beside the allocator of PyTorch."""
    axes = sum(degree > 1 for degree in planned.strategy.mesh_axes().values())
    return _LIBRARIES_BYTES + axes * _BUFFERS_BYTES


def _margin(planned: PlannedStep, num_bytes: int) -> int:
    return of_libraries(planned) + int(_UNUSABLE * num_bytes)
