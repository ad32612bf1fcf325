"""Predicted memory of each pipeline stage of a strategy on a device, by cause.

    weights       this rank's shard, 32 bits
    gathered      peak of parameters gathered from other ranks
    gradients     gradients kept between microbatches, and gradients that are not reduced yet
    optimizer     the two moments of AdamW
    casts         weights in the data type of the arithmetic, where each block casts its own
    activations   microbatches in flight, recomputed activations, and temporary buffers
    logits        further temporaries of the loss, on the last stage
    margin        GPUs only: libraries, buffers of collectives, and allocator fragmentation

All causes except `margin` are from `Plan.holds` and account/activations.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch

from phalanx.account.activations import Activations, activations, peak_on_rank
from phalanx.measure.memory import Kind
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import cut_of, schedule_of
from phalanx.parallel.reduce import BUCKET_BYTES
from phalanx.parallel.split import StateBytes
from phalanx.planner.machine import Device
from phalanx.planner.planned import PlannedStep, plan_of
from phalanx.planner.software import DEFAULT, Software
from phalanx.planner.stages import microbatches_for_peak
from phalanx.strategy import Strategy

_LIBRARIES_BYTES: Final = 1 << 30
"""Bytes of the CUDA context, kernels and workspaces of matrix products."""

_BUFFERS_BYTES: Final = 256 << 20
"""Bytes of NCCL buffers for each axis that communicates."""

_UNUSABLE: Final = 0.04
"""Fraction of allocated memory that is lost to fragmentation of the allocator."""

MOST_ACTIVATIONS, ALL_GRADIENTS = "with the most activations", "with all gradients"
"""The two moments at which memory of a rank may peak."""


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of each cause on a rank of one stage; see the list above.

    Backward frees activations while it creates gradients, so the total peaks at one of two moments:
    with the most activations, or with all gradients.

    Attributes:
        early_gradients: bytes of gradients that exist at the peak of activations: all with
            accumulation over microbatches, else none or the first bucket.
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
    early_gradients: int = 0

    @property
    def total(self) -> int:
        """Bytes of all causes at the peak."""
        return sum(self.at_peak().values())

    @property
    def moment(self) -> str:
        """Moment of the peak: `MOST_ACTIVATIONS` or `ALL_GRADIENTS`."""
        passing = self.casts + self.activations + self.logits
        return (
            ALL_GRADIENTS if self.gradients - self.early_gradients > passing else MOST_ACTIVATIONS
        )

    def at_peak(self) -> dict[str, int]:
        """Return the bytes of each cause at the peak, in the order of the report."""
        names = [
            f.name for f in dataclasses.fields(self) if f.name not in ("stage", "early_gradients")
        ]
        gone = dict.fromkeys(("casts", "activations", "logits"), 0)
        other = gone if self.moment == ALL_GRADIENTS else {"gradients": self.early_gradients}
        return {name: getattr(self, name) for name in names} | other

    def kinds(self) -> dict[Kind, int]:
        """Return the peak bytes of each cause by the kinds of `MemoryLedger`."""
        return _kinds({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def kinds_at_peak(self) -> dict[Kind, int]:
        """Return the bytes at the peak by the kinds of `MemoryLedger`."""
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
def memory(planned: PlannedStep, device: Device, software: Software = DEFAULT) -> list[StageMemory]:
    """Return the memory of a rank at each pp coordinate; any_module.py handles `PlannedModule`.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    strategy, is_accumulated = planned.strategy, planned.accumulation > 1
    plan_of(planned)  # raises StrategyError
    where = "cpu" if device.kind == "cpu" else "cuda"
    found: list[StageMemory] = []
    for pp_rank, passing in enumerate(_passing(planned.with_one_data_axis, where, software)):
        held = _held(strategy, planned.shape, planned.precision, is_accumulated, passing.like)
        causes = {
            "weights": held.parameter_bytes,
            "gathered": held.gathered_bytes,
            "gradients": _gradient_bytes(planned, held),
            "optimizer": held.optimizer_bytes,
            "casts": passing.casts,
            "activations": passing.activations,
            "logits": passing.logits,
        }
        beside = margin(strategy, sum(causes.values())) if device.kind == "gpu" else 0
        early = early_bytes(strategy, planned.accumulation, causes["gradients"])
        found.append(StageMemory(stage=pp_rank, margin=beside, early_gradients=early, **causes))
    return found


class _Passing(NamedTuple):
    """Bytes of a rank that a backward frees, and the first rank with equal stages."""

    casts: int
    activations: int
    logits: int
    like: int


@functools.lru_cache(maxsize=1 << 12)
def _passing(
    planned: PlannedStep, where: Literal["cpu", "cuda"], software: Software
) -> list[_Passing]:
    """Return the bytes at each pp coordinate; they do not depend on how fsdp shards."""
    strategy, shape = planned.strategy, planned.shape
    of_one, uncast = (_activations(planned, where, software, casts) for casts in (None, False))
    cut = schedule = None
    if strategy.pp.degree > 1:  # of the strategy, since a plan with one data axis may be illegal
        cut = cut_of(strategy, shape)
        schedule = schedule_of(strategy, microbatches_for_peak(strategy, planned.accumulation))
    found: list[_Passing] = []
    alike: dict[tuple[tuple[int, bool, bool], ...], int] = {}
    last = shape.num_layers + 1
    for pp_rank in range(strategy.pp.degree):
        stages = schedule.stages_of(pp_rank) if schedule is not None else ()
        cuts = [cut[stage] for stage in stages] if cut is not None else []
        parts = tuple((len(links), 0 in links, last in links) for links in cuts)
        at = shape.num_layers, cut, schedule, pp_rank
        most, without_casts, without_logits = (
            peak_on_rank(of, *at)
            for of in (of_one, uncast, dataclasses.replace(uncast, head_peak=uncast.head))
        )
        logits = without_casts - without_logits
        of_head = min(logits, _head_cast_bytes(planned))
        casts = max(most - without_casts + of_head, of_one.block_peak - uncast.block_peak)
        like = alike.setdefault(parts, pp_rank)
        found.append(_Passing(casts, without_logits, logits - of_head, like))
    return found


def early_bytes(strategy: Strategy, accumulation: int, gradient_bytes: int) -> int:
    """Return the bytes of gradients that exist at the peak of activations."""
    if accumulation > 1:
        return gradient_bytes
    has_buckets = strategy.fsdp.degree == 1 < strategy.dp.degree * strategy.sample_shards
    return min(gradient_bytes, BUCKET_BYTES if has_buckets else 0)


def _activations(
    planned: PlannedStep, where: Literal["cpu", "cuda"], software: Software, casts: bool | None
) -> Activations:
    """Return the activations, scaled to the training program, with its logits in the head."""
    strategy = planned.strategy
    of = activations(
        *(planned.shape, strategy, planned.seq_len, planned.microbatch, planned.precision),
        device=where,
        has_documents=planned.has_documents,
        has_casts=casts,
    )
    scale, head = software.kept, of.head_peak
    if software.logit_bytes:
        tokens = planned.microbatch * planned.seq_len // strategy.sample_shards
        vocabulary = planned.shape.vocab_size // strategy.tp.degree
        head = of.head + tokens * vocabulary * software.logit_bytes
    blocks, recomputed = int(of.blocks * scale), int(of.recomputed * scale)
    return dataclasses.replace(of, blocks=blocks, recomputed=recomputed, head_peak=head)


def _gradient_bytes(planned: PlannedStep, held: StateBytes) -> int:
    """Return the peak bytes of gradients.

    With fsdp and without accumulation, a tied embedding has no gradient until all blocks are
    reduced: the part from the head counts as an activation until then (`Activations.tied`).
    """
    num_bytes = held.gradient_bytes + held.unreduced_bytes
    strategy, shape = planned.strategy, planned.shape
    if not shape.tied or planned.accumulation > 1 or strategy.fsdp.degree == 1:
        return num_bytes
    tied = shape.vocab_size * shape.hidden * 4 // strategy.tp.degree
    at_end = held.gradient_bytes + tied - tied // strategy.num_shards
    return min(num_bytes, max(num_bytes - tied, at_end))


def _head_cast_bytes(planned: PlannedStep) -> int:
    """Return the bytes of the loss's cast output projection, which fsdp gathers already cast."""
    dtype: torch.dtype = getattr(torch, planned.precision)
    shape, tp = planned.shape, planned.strategy.tp.degree
    return shape.vocab_size * shape.hidden * dtype.itemsize // tp if dtype.itemsize < 4 else 0


@functools.lru_cache(maxsize=1 << 14)
def _held(
    strategy: Strategy, shape: ModelShape, precision: str, is_accumulated: bool, pp_rank: int
) -> StateBytes:
    """Return the trained state's bytes on a rank; they do not depend on the microbatch."""
    planned = PlannedStep(shape, strategy, 1, 1, 1 + is_accumulated, precision)
    return plan_of(planned).for_pp_rank(pp_rank).holds(planned.accumulation)


def heaviest(stages: list[StageMemory]) -> StageMemory:
    """Return the stage with the largest peak."""
    return max(stages, key=lambda each: each.total)


def of_libraries(strategy: Strategy) -> int:
    """Return the GPU bytes that libraries allocate outside PyTorch's allocator."""
    axes = sum(degree > 1 for degree in strategy.mesh_axes().values())
    return _LIBRARIES_BYTES + axes * _BUFFERS_BYTES


def margin(strategy: Strategy, num_bytes: int) -> int:
    """Return the GPU bytes needed in addition to `num_bytes`: libraries and fragmentation."""
    return of_libraries(strategy) + int(_UNUSABLE * num_bytes)
