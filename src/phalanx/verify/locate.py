"""Find the first module, in the order of the computation, at which a strategy goes wrong.

The step that differs is repeated on both sides, with the inputs and outputs of each module
recorded. A tensor is computed after all tensors on which it depends, so every input of the first
tensor that differs, in the reference's order, agrees. If this tensor is an output, its module is
at fault; if it is an input, the calling module is, in its own code between its submodules. The
strategy need not run on the reference's inputs for that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.comm import Ranks
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.data.rows import count_rows
from phalanx.parallel.context.split import attention_of
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.roles import bind_roles
from phalanx.strategy import Strategy
from phalanx.verify.compare import NUM_EPSILONS, Difference, limit_of, size_of
from phalanx.verify.record import Case
from phalanx.verify.reference import ReferenceRun, StepRecord
from phalanx.verify.settings import EVALUATION, ROUTING
from phalanx.verify.snapshot import full_tensors, owner
from phalanx.verify.trace import Aligner, Contribution, Event, Key, Kind, Recorder, gap
from phalanx.verify.verdict import Place

_OF_MODULES = (ROUTING, "loss", "buffer", "gradient", EVALUATION)
"""Quantities that modules compute, forward or backward; norms and updates follow from them."""

Expected = tuple[Event, float]
"""A tensor of the reference, and the largest absolute error that passes."""

Recorded = tuple[Recorder, Sequence[Tensor]]
"""A recorded step of a rank, and the rows of the global batch in each of its microbatches."""


@dataclass(frozen=True)
class RankGaps:
    """Differences between one rank's recorded step and the reference.

    Attributes:
        loss_rank: this rank's coordinate among the ranks whose losses are summed.
        called: names of the modules that were called.
        gaps: (largest absolute error, its microbatch) of each tensor.
        sums: sum over the microbatches of each scalar of the forward, that is, of losses.
        contribution: gradient of the suspect that this rank computed, before any reduction.
    """

    loss_rank: int
    called: set[str]
    gaps: dict[Key, tuple[float, int]]
    sums: dict[Key, float]
    contribution: Contribution | None


def locate(
    case: Case,
    strategy: Strategy,
    comm: Ranks,
    first: Difference,
    repeat: Callable[[Difference], Recorded],
    begin: StepRecord | None = None,
) -> Place:
    """Return where a difference arises; every rank calls this together.

    `repeat` records the differing step or evaluation on this rank. On rank 0 the reference starts
    that step from `begin`; if None, it takes all its own steps first.
    """
    step = first.step
    types = {name: type(module).__name__ for name, module in case.build().named_modules()}
    if first.quantity not in _OF_MODULES:  # losses and gradients of the step agree
        return _outside(first, [], (None, None), 0.0, types)
    expected, gradient = list[Expected](), None
    if comm.is_first:
        # The runs are sequential, because a model may draw from torch's global generator.
        (recorder, gradients), (moved, _) = (
            _of_reference(case, first, comm.device, begin, seed) for seed in (0, 1)
        )
        others = {event.key: event.tensor for event in moved.events}
        for event in recorder.events:
            moves = [others.get(event.key, event.tensor)]
            expected.append((event, limit_of(event.tensor, moves, case.torch_dtype)))
        gradient = gradients.get(first.name)
    expected = broadcast_object(expected)
    recorder, rows = repeat(first)
    again = {} if recorder.gradient is None else {first.name: recorder.gradient}
    again = full_tensors(again, comm).get(first.name)
    aligner = Aligner(count_rows(case.batches[step]))
    if strategy.cp.degree > 1:
        order, coord = attention_of(strategy).order, comm.coord("cp")
        aligner = replace(aligner, order=order, context_rank=coord)
    if strategy.tp.degree > 1:
        roles = {binding.name: binding.role for binding in bind_roles(case.build(), case.roles)}
        aligner = replace(aligner, layout=layout_of(strategy, comm), roles=roles)
    found = gather_objects(_gaps(recorder, rows, aligner, comm, expected))
    limit = max(1e-6, NUM_EPSILONS * torch.finfo(case.torch_dtype).eps)
    place = _first_that_differs(expected, found, step, types)
    return place or _outside(first, found, (gradient, again), limit, types)


def _of_reference(
    case: Case, first: Difference, device: torch.device, begin: StepRecord | None, seed: int
) -> tuple[Recorder, Mapping[str, Any]]:
    """Record a step of the reference, or its evaluation; also return the gradients of the step."""
    run = ReferenceRun(case, device, perturbation=seed)
    recorder = Recorder(run.model)
    is_evaluation = first.quantity == EVALUATION
    if begin is not None:
        run.begin_from(begin, seed)
    else:
        steps = run.steps(recorder.phase)
        for _ in range(first.step + is_evaluation):
            next(steps)
    recorder.is_on = True
    if is_evaluation:
        run.evaluate(recorder.phase)
        return recorder, {}
    return recorder, run.compute(first.step, recorder.phase)["gradient"]


def _gaps(
    recorder: Recorder,
    rows: Sequence[Tensor],
    aligner: Aligner,
    comm: Ranks,
    expected: Sequence[Expected],
) -> RankGaps:
    """Compare the recorded tensors of this rank with the reference's."""
    # An event for each microbatch: the last one, if a first forward counts what experts get.
    ours: defaultdict[Key, dict[int, Event]] = defaultdict(dict)
    for event in recorder.events:
        ours[event.key][event.microbatch] = event
    gaps: dict[Key, tuple[float, int]] = {}
    sums: dict[Key, float] = {}
    for made, _ in expected:
        key, reference = made.key, made.tensor
        for event in ours.get(key, {}).values():
            if event.tensor.ndim == reference.ndim == 0 and key.kind in (Kind.INPUT, Kind.OUTPUT):
                sums[key] = sums.get(key, 0.0) + float(event.tensor)
            elif pair := aligner.pair(event, reference, rows[event.microbatch]):
                error = gap(*pair), event.microbatch
                gaps[key] = max(gaps.get(key, error), error)
    called = {key.module for key in ours}
    return RankGaps(comm.coord("loss"), called, gaps, sums, recorder.contribution)


def _first_that_differs(
    expected: Sequence[Expected], ranks: Sequence[RankGaps], step: int, types: Mapping[str, str]
) -> Place | None:
    """Return the place of the first tensor that differs, in the order of the computation."""
    before: Event | None = None  # latest output, or input gradient, of a module called by the model
    for event, limit in expected:
        key, reference = event.key, event.tensor
        if not any(key.module in rank.called for rank in ranks):
            return Place(key.module, f"{_named(key.module, types)}: it is never called", step)
        # Ranks with the same tokens have the same sum, so it is counted once for each `loss_rank`.
        if sums := {rank.loss_rank: rank.sums[key] for rank in ranks if key in rank.sums}:
            total = torch.tensor(sum(sums.values()), dtype=torch.float64)
            worst, rank, microbatch = gap(total, reference), None, None
        else:
            gaps = [
                (r.gaps[key][0], n, r.gaps[key][1]) for n, r in enumerate(ranks) if key in r.gaps
            ]
            worst, rank, microbatch = max(gaps, default=(0.0, None, None))
        if worst > limit:
            error = worst / (size_of(reference) or 1.0)
            how = "it is not finite" if math.isinf(error) else f"relative error {error:.1e}"
            if not reference.is_floating_point():
                how = "its integers differ"
            own, caller = _named(key.module, types), event.caller
            outer = "the caller of the model" if caller is None else _named(caller, types)
            module, what = {
                Kind.INPUT: (
                    caller, f"{outer}: its input to {own} differs though all earlier tensors agree",
                ),
                Kind.OUTPUT: (key.module, f"{own}: its output differs though its inputs agree"),
                Kind.OUTPUT_GRADIENT: (
                    caller, f"{outer}: backward passes a different gradient to the output of {own}",
                ),
                Kind.INPUT_GRADIENT: (
                    key.module,
                    f"{own}: the gradient of its input differs though its output gradient agrees",
                ),
            }[key.kind]  # fmt: skip
            if (
                before is not None
                and caller == ""
                and key.kind in (Kind.INPUT, Kind.OUTPUT_GRADIENT)
            ):
                # A message between pipeline stages: no rank calls both modules.
                one, other = before.tensor, reference
                is_same = (one.shape, one.dtype) == (other.shape, other.dtype)
                pair = {before.key.module, key.module}
                if is_same and not any(pair <= rank.called for rank in ranks):
                    what += "; received from another stage"
            return Place(module, f"{what}: {how}", step, rank, microbatch)
        if event.caller == "" and key.kind in (Kind.OUTPUT, Kind.INPUT_GRADIENT):
            before = event
    return None


def _sum(made: Sequence[Contribution], like: Tensor) -> Tensor:
    """Return the sum of contributions to a gradient; NaN if one has another shape."""
    total = torch.zeros(like.shape, dtype=torch.float64)
    for offset, term in made:
        part = total[tuple(slice(at, at + size) for at, size in zip(offset, term.shape))]
        if part.shape != term.shape:
            return total.fill_(math.nan)
        part += term
    return total


def _named(name: str, types: Mapping[str, str]) -> str:
    if not name:
        return f"the model itself ({types.get(name, '?')}), outside its modules"
    return f"{name} ({types.get(name, '?')})"


def _outside(
    first: Difference,
    found: Sequence[RankGaps],
    gradients: tuple[Tensor | None, Tensor | None],
    limit: float,
    types: Mapping[str, str],
) -> Place:
    """Return the fault outside all modules, if all their tensors agree, forward and backward.

    `limit` is the largest relative error at which the sum of the ranks' contributions to a gradient
    agrees. `gradients` are the reference's gradient of the suspect, and the strategy's when each
    module reads copies of its inputs.
    """
    agree = "every module's outputs and gradients agree"
    of_experts = ", or in the losses of experts" if "Router" in types.values() else ""
    of_no_module = {
        "loss": f"{agree}, so the fault is in the sum of the losses over ranks{of_experts}",
        EVALUATION: f"{agree} in eval mode, so the fault is in the sum over ranks",
        "learning rate": "the learning rate of the step",
        "norm": "the gradients agree, so the fault is in their norm over shards and stages",
    }
    if first.quantity in of_no_module:
        return Place(None, of_no_module[first.quantity], first.step)
    module = owner(first.name)
    if first.quantity == "buffer":
        what = (
            f"{_named(module, types)}: its outputs and gradients agree, but {first.name} does not"
        )
        return Place(module, what, first.step)
    what = f"{_named(module, types)}: the gradient of {first.name}"
    if first.quantity != "gradient":
        return Place(module, f"{what} agrees, so the optimizer's update is wrong", first.step)
    gradient, again = gradients
    made = [rank.contribution for rank in found if rank.contribution is not None]

    def agrees(other: Tensor) -> bool:
        if gradient is None or other.shape != gradient.shape:
            return False
        return gap(other, gradient) <= limit * float(gradient.abs().max())

    if again is not None and agrees(again):
        why = "once each module reads copies, so a tensor saved for backward is overwritten"
        return Place(module, f"{what} agrees {why}", first.step)
    if made and gradient is not None and agrees(_sum(made, gradient)):
        return Place(
            module,
            f"{_named(module, types)}: the ranks' contributions to the gradient of "
            f"{first.name} add up, so the fault is in the sum over ranks or microbatches",
            first.step,
        )
    return Place(module, f"{what} differs though {agree}", first.step)
