"""Find the first module, in the order of the computation, at which a strategy goes wrong.

The step that differs runs again on both sides, recorded. Whatever a module takes and gives is made
after all it depends on, so the first tensor that differs, by the reference's order of time, has
agreeing causes: if it is a result, its module is at fault, and if it is an argument, the module
that called it, between its own modules. No run on the reference's inputs is needed for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from phalanx.comm.comm import Ranks
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.roles import bind_roles
from phalanx.strategy import Strategy
from phalanx.verify.batches import count_rows
from phalanx.verify.compare import Difference
from phalanx.verify.record import Case, SplitRun
from phalanx.verify.reference import ReferenceRun
from phalanx.verify.tolerance import limit_of
from phalanx.verify.trace import (
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Aligner,
    Event,
    Key,
    Recorder,
    by_microbatch,
    gap,
)
from phalanx.verify.verdict import Place


@dataclass(frozen=True)
class Expected:
    """A tensor of the reference, and how far another may lie from it."""

    event: Event
    limit: float


@dataclass(frozen=True)
class Recording:
    """A step on one rank, recorded.

    Attributes:
        recorder: with its events.
        rows: of the global batch that are in each microbatch.
        place: of this rank among the data ranks.
    """

    recorder: Recorder
    rows: Sequence[Tensor]
    place: int


Record = Callable[[int, str | None], Recording]
"""Records the step of a number on this rank; given the name of a parameter, its gradient too."""


@dataclass(frozen=True)
class Found:
    """What one rank has compared.

    Attributes:
        gaps: (largest gap, its microbatch) of each tensor.
        sums: of each number made in forward, over the microbatches: losses, which add up.
        called: names of the modules that were called.
        contribution: the gradient of the suspect that this rank made, before any reduction.
        place: of this rank among the data ranks.
    """

    gaps: dict[Key, tuple[float, int]]
    sums: dict[Key, float]
    called: set[str]
    contribution: Tensor | None
    place: int


def locate(
    case: Case,
    strategy: Strategy,
    comm: Ranks,
    first: Difference,
    record: Record | None = None,
) -> Place:
    """Return where a difference arises; every rank calls this together.

    Args:
        case: what was run.
        strategy: how it was split.
        comm: of the strategy.
        first: the first difference.
        record: how a step is run again; as `SplitRun` does if None.
    """
    step = first.step
    if first.quantity == "first weight":
        return Place(_owner(first.name), f"the first weights of {first.name} differ", step)
    is_first = torch.distributed.get_rank() == 0
    expected: list[Expected] = broadcast_object(_expected(case, step, comm) if is_first else None)
    suspect = first.name if first.quantity == "gradient" else None
    recording = (record or partial(_record, case, strategy, comm))(step, suspect)
    results: list[Found] = gather_objects(_found(recording, case, strategy, comm, step, expected))
    types = {name: type(module).__name__ for name, module in case.build().named_modules()}
    place = _first_that_differs(expected, results, step, types)
    if place is not None:
        return place
    gradient = None
    if is_first and suspect is not None:
        gradient = _reference_gradient(case, step, comm, suspect)
    return _outside(first, step, results, gradient, types)


def _expected(case: Case, step: int, comm: Ranks) -> list[Expected]:
    """Record a step of the reference, and of the perturbed one for the limits."""
    events, moved = (
        _recorded(ReferenceRun(case, comm.device, perturbation=seed), step) for seed in (0, 1)
    )
    dtype: torch.dtype = getattr(torch, case.dtype)
    others = {event.key: event.tensor for event in moved}
    return [
        Expected(event, limit_of(event.tensor, others.get(event.key, event.tensor), dtype))
        for event in events
    ]


def _recorded(run: ReferenceRun, step: int) -> list[Event]:
    recorder = Recorder(run.model)
    steps = run.steps(recorder.phase)
    for _ in range(step):
        next(steps)
    recorder.restart()
    next(steps)
    return recorder.events


def _reference_gradient(case: Case, step: int, comm: Ranks, name: str) -> Tensor | None:
    for number, record in enumerate(ReferenceRun(case, comm.device).steps()):
        if number == step:
            return record.gradients.get(name)
    return None


def _record(
    case: Case, strategy: Strategy, comm: Ranks, step: int, suspect: str | None
) -> Recording:
    run = SplitRun(case, strategy, comm)
    recorder = Recorder(run.model, copies=strategy.tp.degree == 1, suspect=suspect)
    steps = run.steps(recorder.phase)
    for _ in range(step):
        next(steps)
    recorder.restart()
    next(steps)
    return Recording(recorder, run.rows(step), run.place[0])


def _found(
    recording: Recording,
    case: Case,
    strategy: Strategy,
    comm: Ranks,
    step: int,
    expected: list[Expected],
) -> Found:
    """Compare what was recorded on this rank with the reference's."""
    layout: Layout | None = None
    roles: dict[str, str] = {}
    if strategy.tp.degree > 1:
        layout = layout_of(strategy, comm)
        roles = {binding.name: binding.role for binding in bind_roles(case.build(), case.roles)}
    recorder = recording.recorder
    aligner = Aligner(count_rows(case.batches[step]), layout, roles)
    gaps, sums = _compare(recorder.events, aligner, recording.rows, expected)
    called = {event.key.module for event in recorder.events}
    return Found(gaps, sums, called, recorder.contribution, recording.place)


def _compare(
    events: list[Event], aligner: Aligner, rows: Sequence[Tensor], expected: list[Expected]
) -> tuple[dict[Key, tuple[float, int]], dict[Key, float]]:
    ours = by_microbatch(events)
    gaps: dict[Key, tuple[float, int]] = {}
    sums: dict[Key, float] = {}
    for each in expected:
        key, reference = each.event.key, each.event.tensor
        for event in ours.get(key, []):
            if reference.ndim == 0 and key.kind in (INPUT, OUTPUT):
                sums[key] = sums.get(key, 0.0) + float(event.tensor)
                continue
            pair = aligner.pairs(event, reference, rows[event.microbatch])
            if pair is not None:
                found = gap(*pair), event.microbatch
                gaps[key] = max(gaps.get(key, found), found)
    return gaps, sums


def _first_that_differs(
    expected: list[Expected], results: list[Found], step: int, types: dict[str, str]
) -> Place | None:
    for each in expected:
        key = each.event.key
        if not any(key.module in result.called for result in results):
            return Place(key.module, f"{_named(key.module, types)}: it is never called", step)
        worst, rank, microbatch = _worst(each, results)
        if worst > each.limit:
            module, what = _blame(each.event, types)
            size = float(each.event.tensor.double().abs().max())
            error = worst / size if size else worst
            how = "it is not finite" if math.isinf(error) else f"relative error {error:.1e}"
            if not each.event.tensor.is_floating_point():
                how = "its integers differ"
            return Place(module, f"{what}: {how}", step, rank, microbatch)
    return None


def _worst(expected: Expected, results: list[Found]) -> tuple[float, int | None, int | None]:
    """Return the largest gap of a tensor, its rank and its microbatch."""
    key = expected.event.key
    sums = {result.place: result.sums[key] for result in results if key in result.sums}
    if sums:  # tp's ranks of one place have the same sum
        total = torch.tensor(sum(sums.values()), dtype=torch.float64)
        return gap(total, expected.event.tensor), None, None
    found = [
        (r.gaps[key][0], rank, r.gaps[key][1]) for rank, r in enumerate(results) if key in r.gaps
    ]
    return max(found, default=(0.0, None, None))


def _blame(event: Event, types: dict[str, str]) -> tuple[str | None, str]:
    """Return the module at fault, and what of it differs, in words."""
    key, caller = event.key, event.caller
    own = _named(key.module, types)
    outer = "what calls the model" if caller is None else _named(caller, types)
    if key.kind == OUTPUT:
        return key.module, f"{own}: its output differs though its inputs agree"
    if key.kind == INPUT_GRADIENT:
        return key.module, (
            f"{own}: the gradient of its input differs though that of its output agrees"
        )
    if key.kind == OUTPUT_GRADIENT:
        return caller, f"{outer}: backward gives another gradient to the output of {own}"
    return caller, f"{outer}: what it gives to {own} differs though all before agrees"


def _named(name: str, types: dict[str, str]) -> str:
    if not name:
        return f"the model itself ({types.get(name, '?')}), outside its modules"
    return f"{name} ({types.get(name, '?')})"


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _outside(
    first: Difference,
    step: int,
    results: list[Found],
    gradient: Tensor | None,
    types: dict[str, str],
) -> Place:
    """Say what is at fault where all modules agree, forward and backward."""
    agree = "every module's outputs and gradients agree"
    if first.quantity == "loss":
        return Place(None, f"{agree}, so it is the sum of the losses over ranks", step)
    if first.quantity == "norm":
        return Place(None, "the gradients agree, so it is the norm over their shards", step)
    owner = _owner(first.name)
    own = _named(owner, types)
    if first.quantity != "gradient":
        what = f"{own}: the gradient of {first.name} agrees, so it is its update by the optimizer"
        return Place(owner, what, step)
    made = [r.contribution for r in results if r.contribution is not None]
    if gradient is not None and made and all(t.shape == gradient.shape for t in made):
        if gap(torch.stack(made).sum(0), gradient) <= 1e-6 * float(gradient.abs().max()):
            what = f"{own}: what the ranks themselves made of the gradient of {first.name} adds up"
            return Place(owner, f"{what}, so it is its sum over ranks or microbatches", step)
    return Place(owner, f"{own}: the gradient of {first.name} differs though {agree}", step)
