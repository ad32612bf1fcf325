"""Memory of each pipeline stage of a strategy on a device, by cause: one function, three details.

    weights       this rank's shard, 32 bits; frozen ones in the data type of the arithmetic
    gathered      peak of parameters gathered from other ranks
    gradients     gradients kept between microbatches, and gradients that are not reduced yet
    optimizer     the two moments of AdamW, or the one of Muon's matrices
    casts         weights in the data type of the arithmetic, where each block casts its own
    activations   microbatches in flight, recomputed activations, and temporary buffers
    logits        further temporaries of the loss, on the last stage
    margin        GPUs only: libraries, buffers of collectives, and allocator fragmentation

    detail         weights, gradients, optimizer   activations          the others
    state          closed forms, no torch          0                    0
    activations    closed forms                    with casts, logits   0
    all            of the plan                     by cause             counted

"state" and "activations" are lower bounds of a decoder's memory. All causes of "all" except
`margin` are from `Plan.holds`, activations.py and module.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal

from phalanx.account.parameters import num_parameters, parameters_of
from phalanx.account.planned import DecoderModel, PlannedStep
from phalanx.parallel.pipeline.cut import cut_of, schedule_of
from phalanx.strategy import Strategy

_LIBRARIES_BYTES: Final = 1 << 30
"""Bytes of the CUDA context, kernels and workspaces of matrix products."""

_BUFFERS_BYTES: Final = 256 << 20
"""Bytes of NCCL buffers for each axis that communicates."""

_UNUSABLE: Final = 0.04
"""Fraction of allocated memory that is lost to fragmentation of the allocator."""

MOST_ACTIVATIONS, ALL_GRADIENTS = "with the most activations", "with all gradients"
"""The two moments at which memory of a rank may peak."""

Detail = Literal["state", "activations", "all"]


@dataclass(frozen=True, kw_only=True)
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
    gathered: int = 0
    gradients: int
    optimizer: int
    casts: int = 0
    activations: int
    logits: int = 0
    margin: int = 0
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

    @property
    def causes(self) -> dict[str, int]:
        """The bytes of each cause at its own peak, in the order of the report."""
        names = [f.name for f in dataclasses.fields(self)]
        return {n: getattr(self, n) for n in names if n not in ("stage", "early_gradients")}

    def at_peak(self) -> dict[str, int]:
        """Return the bytes of each cause at the peak of the total, in the order of the report."""
        gone = dict.fromkeys(("casts", "activations", "logits"), 0)
        other = gone if self.moment == ALL_GRADIENTS else {"gradients": self.early_gradients}
        return self.causes | other


def memory(
    step: PlannedStep[Any],
    device: str,
    detail: Detail = "all",
    *,
    kept: float = 1.0,
    logit_bytes: int = 0,
) -> list[StageMemory]:
    """Return the memory of a rank at each pp coordinate.

    Args:
        step: the model, its strategy and batch; of a decoder, unless `detail` is "all".
        device: kind of the device: "cpu", "gpu" or "tpu".
        detail: causes to count; see the table above.
        kept: saved activation bytes, relative to our kernels.
        logit_bytes: bytes held per logit of a microbatch; 0 if the loss runs in chunks.

    Raises:
        StrategyError: the strategy cannot split the model.
    """
    if detail != "all":
        # No gathered weights and no buckets count, so that no step that fits exceeds the bounds.
        bounds: list[StageMemory] = []
        model, strategy, shape = step.model, step.strategy, step.model.shape
        for pp_rank in range(strategy.pp.degree):
            cut = schedule = None
            if strategy.pp.degree > 1:
                cut, schedule = cut_of(strategy, shape), schedule_of(strategy, step.accumulation)
            of_rank = () if schedule is None else schedule.stages_of(pp_rank)
            count, tp = parameters_of(shape, cut, of_rank), strategy.tp.degree
            item_bytes = {"float64": 8, "float32": 4}.get(model.precision, 2)
            frozen = (count.total - count.trained) // tp // strategy.num_shards * item_bytes
            experts = count.experts // tp * max(4, item_bytes) if shape.lora is None else 0
            split = count.trained // tp * max(4, item_bytes) - experts
            shard = split // strategy.num_shards + experts // strategy.num_expert_shards
            split += experts // strategy.ep.degree
            # ZeRO-1 accumulates unsharded gradients; with one microbatch it reduces each as it is
            # computed.
            adds_whole = strategy.fsdp.kind == "zero1" and step.accumulation > 1
            gradients, activations = split if adds_whole else shard, 0
            if detail == "activations":
                from phalanx.account.activations import activations as count_activations
                from phalanx.account.activations import peak_on_rank

                of_one = count_activations(
                    *(shape, strategy, model.seq_len, step.microbatch, model.precision),
                    device="cpu" if device == "cpu" else "cuda",
                )
                activations = peak_on_rank(of_one, shape.num_layers, cut, schedule, pp_rank)
            bounds.append(
                StageMemory(
                    stage=pp_rank,
                    weights=frozen + shard,
                    optimizer=int(min(model.moments, 1 if model.is_muon else 2) * shard),
                    gradients=gradients,
                    activations=activations,
                    early_gradients=gradients if step.accumulation > 1 else 0,
                )
            )
        return bounds
    from phalanx.parallel.reduce import BUCKET_BYTES

    model, strategy, is_accumulated = step.model, step.strategy, step.accumulation > 1
    _ = step.plan  # raises StrategyError
    # Memory over one step, without accumulation; the total peaks at (1) or at (2):
    #
    #                       (1)             (2)
    #     activations     __--''--__                       rise in forward, fall in backward
    #     gradients                  __--|           rise in backward, end with the step
    #     weights,        ----------------------------     stay
    #     moments        | forward | backward | optimizer
    #
    # With accumulation all gradients are there at (1), from the second microbatch on.
    stages: list[StageMemory] = []
    for pp_rank, passing in enumerate(model.in_flight(step, device, kept, logit_bytes)):
        held = model.held(step, passing.like)
        gradients = held.gradient_bytes + held.unreduced_bytes
        trained_bytes = held.optimizer_bytes // 2  # frozen parameters have no moments
        if strategy.fsdp.degree > 1 and not is_accumulated:
            # A tied embedding has no gradient until all blocks are reduced: the part from the head
            # counts as an activation until then (`Activations.tied`).
            tied = model.tied_bytes // strategy.tp.degree
            at_end = held.gradient_bytes + tied - tied // strategy.num_shards
            gradients = min(gradients, max(gradients - tied, at_end))
        has_buckets = strategy.fsdp.degree == 1 < strategy.data_ranks * strategy.sample_shards
        # Muon has one moment of each matrix of a block.
        matrices = (
            model.muon_matrices(step, passing.like) if isinstance(model, DecoderModel) else ()
        )
        one_moment = sum(each.shard_bytes for each in matrices)
        bucket = BUCKET_BYTES if has_buckets else 0
        of = StageMemory(
            stage=pp_rank,
            weights=held.parameter_bytes,
            gathered=held.gathered_bytes,
            gradients=gradients,
            optimizer=int(model.moments * trained_bytes - one_moment),
            casts=passing.casts,
            activations=passing.activations,
            logits=passing.logits,
            early_gradients=gradients if is_accumulated else min(gradients, bucket),
        )
        if device == "gpu":
            margin = of_libraries(strategy) + int(_UNUSABLE * sum(of.causes.values()))
            of = dataclasses.replace(of, margin=margin)
        stages.append(of)
    return stages


def least_bytes(step: PlannedStep[Any]) -> float:
    """Return a lower bound of the trained state's bytes on a rank, for a stage of average size.

    This is the rank's shard of weights, gradients and moments, and the tensors that its ZeRO stage
    leaves unsharded: 16-bit weights for zero1 and zero2, and 32-bit gradients for zero1 with
    accumulation. It holds for every cut of the model into stages.
    """
    strategy = step.strategy
    ranks = strategy.tp.degree * strategy.pp.degree
    experts = (
        num_parameters(step.model.shape).experts / ranks if step.model.shape.lora is None else 0
    )
    split = step.model.num_trained / ranks - experts
    shard = split / strategy.num_shards + experts / strategy.num_expert_shards
    split += experts / strategy.ep.degree
    least = 4 * (2 + min(step.model.moments, 1 if step.model.is_muon else 2)) * shard
    if strategy.fsdp.degree > 1:
        whole = {"zero1": 2 + (4 if step.accumulation > 1 else 0), "zero2": 2}
        least += whole.get(strategy.fsdp.kind, 0) * 0.9 * (split - shard)
    return least


def heaviest(stages: list[StageMemory]) -> StageMemory:
    """Return the stage with the largest peak."""
    return max(stages, key=lambda each: each.total)


def of_libraries(strategy: Strategy) -> int:
    """Return the GPU bytes that libraries allocate outside PyTorch's allocator."""
    axes = sum(degree > 1 for degree in strategy.mesh_axes().values())
    return _LIBRARIES_BYTES + axes * _BUFFERS_BYTES
