"""Compare two records of a step, tensor by tensor, in the order in which the step computes them.

The error of a tensor is max |a - b| / max |b|, with b from the reference. The divisor is at least
FLOOR times the largest gradient (or moment, or weight) of the whole model, because some gradients
are zero except for rounding, such as the gradient of the bias of attention's keys, which softmax
cancels.

The law of tolerance:

    float64                 EXACT for all tensors: only the order of sums differs
    narrower, a case        FACTOR times each tensor's movement by rounding (StepwiseReference)
    narrower, an own loop   LIMITS of the type, or the movement by rounding (RoundingProbe)
    narrower, a training    NARROW_ERROR for losses against float64, whose steps drift apart

The movement is the largest change of a tensor when each weight is moved by the type's epsilon, up
or down, several times (TTrace, arXiv 2506.09280, section 5). On a CPU, sums over many rows can lose
more: torch sums the rows of the gradient of LayerNorm's weight in bfloat16, and the reference sums
all rows of a batch where a rank sums some. So a tensor of a case also passes if it is within its
limit of the same step in the next wider type.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from phalanx.data.rows import cast_batch
from phalanx.verify.record import Case
from phalanx.verify.reference import ReferenceRun, Routed, StepRecord, Values, evaluating
from phalanx.verify.settings import ROUTING, STATE

DTYPES = ("float64", "float32", "bfloat16")
"""Data types in which `verify` can run."""

_WIDER = {"bfloat16": "float32", "float32": "float64"}

EXACT = 1e-10
"""Largest relative error in float64, where only the order of summation differs."""

FACTOR = 8.0
"""Largest error in narrower types, as a multiple of the change under the perturbations."""

NUM_EPSILONS = 16.0
"""Smallest limit in narrower types, in epsilons of the type, relative to the largest element."""

UPDATE_EPSILONS = 4.0
"""Limit for an update with equal inputs, in epsilons of the type; relative, as NUM_EPSILONS."""

LIMITS = {
    torch.float64: EXACT, torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 0.1,
}  # fmt: skip
"""Largest error of a gradient or loss of a user's own loop, by the type that it is computed in.

A step of rounding differs by about 1e-6 in float32. But a ReLU or a maximum of pooling whose input
rounds to the other side moves a gradient by the part of one position. A gradient beyond the limit
may differ by FACTOR times its movement by rounding, see `RoundingProbe`.
"""

NOISE = 1e-2
"""Fraction of the largest gradient below which float32 and narrower types have mostly rounding."""

_LEAST_LOSS = 1e-2
"""Smallest divisor of a loss's error, for a loss that is a small difference of large terms."""

NARROW_ERROR = 5e-3
"""Largest error of a loss of a training in a narrow type, against float64."""

FLOOR = {"gradient": 1e-4, "first moment": 1e-4, "second moment": 1e-8, "weight": 1e-1}
"""Smallest divisor of an error, as a fraction of the largest magnitude in the whole model."""


@dataclass(frozen=True)
class Difference:
    """One compared quantity of one step.

    Attributes:
        step: number of the step, from 0.
        quantity: one of QUANTITIES, "first weight", "step counter", or STATE and a state's key.
        name: name of the parameter, or p of the norm; empty for a quantity with one value.
        error: relative error; infinite if one side is missing or not finite.
        limit: largest error that passes.
        problem: fault other than the size of the error: "it is missing", "it is NaN, ...".
        both: "NaN" or "infinite" if both sides are so in the same elements, which count as equal.
        ratio: factor between the two sides if it is the same for all elements, else None.
    """

    step: int
    quantity: str
    name: str
    error: float
    limit: float = EXACT
    problem: str = ""
    both: str = ""
    ratio: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the error is within the limit."""
        return self.error <= self.limit

    @property
    def what(self) -> str:
        """The quantity in words."""
        if self.quantity == "norm":
            return f"the {self.name}-norm of the gradient"
        return f"{self.quantity} of {self.name}" if self.name else f"the {self.quantity}"

    def __str__(self) -> str:
        error = self.problem or f"relative error {self.error:.1e}, limit {self.limit:.0e}"
        return f"step {self.step}, {self.what}: {error}"


def compare_step(
    step: int,
    ours: StepRecord,
    reference: StepRecord,
    moved: Sequence[StepRecord] = (),
    dtype: torch.dtype = torch.float64,
    noise: float = 0.0,
) -> list[Difference]:
    """Compare all quantities of one step with the reference.

    `moved` are the records of perturbed references, which set the limits; empty in float64.
    `noise` is for `compare_values`.
    """
    rows: list[Difference] = []
    for quantity, expected in reference.items():
        others = [each[quantity] for each in moved]
        rows += compare_values(
            step, quantity, ours.get(quantity, {}), expected, others, dtype, noise
        )
    return rows


def compare_rounded(
    step: int,
    ours: StepRecord,
    reference: StepRecord,
    dtypes: set[torch.dtype],
    movement: Callable[[torch.dtype], Mapping[str, float]],
) -> list[Difference]:
    """Compare a step of a user's own loop, from equal weights, in the types it is computed in.

    `movement` returns how far rounding moves each gradient, if one is beyond its limit.
    """
    dtype = max(dtypes & LIMITS.keys(), key=LIMITS.__getitem__)
    weights = [torch.as_tensor(each) for each in reference.get("weight", {}).values()]
    types = {torch.float32, *(each.dtype for each in weights)}
    update = 32 * max(torch.finfo(each).eps for each in types)
    limits = {"first weight": 0.0, "weight": update, "learning rate": update}
    moved: Mapping[str, float] | None = None
    rows: list[Difference] = []
    for row in compare_step(step, ours, reference, noise=NOISE):
        error, limit = row.error, limits.get(row.quantity, LIMITS[dtype])
        if row.quantity == "loss":
            error *= min(1.0, abs(float(reference["loss"][row.name])) / _LEAST_LOSS)
        elif row.quantity == "gradient" and limit < error < math.inf:
            moved = movement(dtype) if moved is None else moved
            limit = max(limit, FACTOR * moved.get(row.name, 0.0))
        rows.append(within(limit, row, error))
    return rows


def compare_update(
    step: int, ours: StepRecord, reference: StepRecord, begin: StepRecord, dtype: torch.dtype
) -> list[Difference]:
    """Compare an optimizer update in a narrow type, given equal inputs on both sides.

    An update adds a change to the value in `begin`. Rounding is relative to these terms, which may
    cancel, as a moment and a gradient of opposite sign do. No term exceeds the sum of the old
    and the new value, so the larger of the two divides the error.
    """
    limit = UPDATE_EPSILONS * torch.finfo(dtype).eps
    return [
        dataclasses.replace(row, limit=limit, ratio=row.ratio if row.error > limit else None)
        for quantity, expected in reference.items()
        for row in compare_values(
            step, quantity, ours[quantity], expected, before=begin.get(quantity, {})
        )
    ]


def compare_values(
    step: int,
    quantity: str,
    ours: Values,
    reference: Values,
    moved: Sequence[Values] = (),
    dtype: torch.dtype = torch.float64,
    noise: float = 0.0,
    before: Values | None = None,
) -> list[Difference]:
    """Compare one quantity, gradients in the order of backward: the last parameters first.

    `noise` is the smallest divisor of a gradient's error, as a fraction of the largest gradient, if
    it is above FLOOR. In float32 the rounding of a gradient that cancels is above FLOOR.
    The largest element of a tensor in `before` divides the error if it exceeds the reference's.

    Equal non-finite elements of both sides count as equal, and are reported in `Difference.both`.
    """
    rows: list[Difference] = []
    largest = max((size_of(_wide(value)) for value in reference.values()), default=0.0)
    names = list(reference)[:: -1 if quantity == "gradient" else 1]
    for name in [*names, *(name for name in ours if name not in reference)]:
        a, b = (_wide(values[name]) if name in values else None for values in (ours, reference))
        problem = _problem(a, b)
        if problem or a is None or b is None:
            rows.append(Difference(step, quantity, name, math.inf, problem=problem))
            continue
        both, is_finite = _kind(b), b.isfinite()
        floor = FLOOR["first moment"] if quantity.startswith(STATE) else FLOOR.get(quantity, 0.0)
        floor = max(floor, noise) if quantity == "gradient" else floor
        old = _wide((before or {}).get(name, 0.0))
        scale = max(size_of(b), size_of(old), floor * largest) or 1.0
        error = size_of(a - b) / scale
        others = [_wide(values[name]) for values in moved if name in values]
        limit = limit_of(b, others, dtype, scale) / scale if others else EXACT
        ratio = None if error <= limit else common_ratio(a[is_finite], b[is_finite])
        rows.append(Difference(step, quantity, name, error, limit, both=both, ratio=ratio))
    return rows


def _wide(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def size_of(tensor: Tensor) -> float:
    """Return the largest magnitude of the finite elements."""
    wide = tensor.double()
    wide = wide[wide.isfinite()]
    return float(wide.abs().max()) if wide.numel() else 0.0


def same(ours: Tensor, reference: Tensor) -> Tensor:
    """Return a mask of the elements that are equal in two tensors, or NaN in both."""
    return (ours == reference) | (ours.isnan() & reference.isnan())


def _problem(ours: Tensor | None, reference: Tensor | None) -> str:
    """Return why the difference of two tensors cannot be measured, or "" if it can."""
    if reference is None:
        return "it does not exist in one process"
    if ours is None:
        return "it is missing"
    if ours.shape != reference.shape:
        return f"its shape is {tuple(ours.shape)}; expected {tuple(reference.shape)}"
    if bool((same(ours, reference) | (ours.isfinite() & reference.isfinite())).all()):
        return ""
    here, there = (_kind(tensor) or "finite" for tensor in (ours, reference))
    if there == "finite":
        return f"it is {here}, but finite in one process"
    if here == there:
        return f"it is {here} in different elements than in one process"
    return f"it is {here}, but {there} in one process"


def _kind(tensor: Tensor) -> str:
    if bool(tensor.isnan().any()):
        return "NaN"
    return "infinite" if bool(tensor.isinf().any()) else ""


def limit_of(
    reference: Tensor, moved: Sequence[Tensor], dtype: torch.dtype, least: float = 0.0
) -> float:
    """Return the largest absolute error that passes.

    The limit is never below a fixed fraction of the largest element, or of `least` if larger.
    """
    movement = max((size_of(each.double() - reference.double()) for each in moved), default=0.0)
    relative = EXACT if dtype == torch.float64 else NUM_EPSILONS * torch.finfo(dtype).eps
    least = relative * max(least, size_of(reference))
    return max(FACTOR * movement, least)


def common_ratio(ours: Tensor, reference: Tensor) -> float | None:
    """Return r if `ours` is r times the reference in every element, within 1e-6, else None."""
    square = float((reference * reference).sum())
    if square == 0 or not math.isfinite(square):
        return None
    ratio = float((ours * reference).sum()) / square
    rest = float((ours - ratio * reference).abs().max())
    return ratio if rest <= 1e-6 * float(ours.abs().max()) else None


PERTURBATIONS = (1, 2, 3)
"""Seeds of the perturbed references."""


class StepwiseReference:
    """The reference of a case, which takes each step after the ranks have and compares the two.

    In float64 the reference takes its own steps, and one limit applies to all steps.

    In a narrower type two correct runs diverge by rounding alone: Adam's first step moves each
    weight by the learning rate in the direction of its gradient's sign, so a tiny gradient whose
    sign flips changes the weight by twice the rate. So each step of the reference starts from the
    weights, buffers and moments from which the ranks started it, its routers select the experts
    that the ranks' have selected, and its update uses the ranks' gradients. The limits of loss,
    buffers and gradients come from perturbed references; the update has equal inputs on both sides,
    so it agrees within a few epsilons.

    Attributes:
        begin: state from which the current step started; None if the reference takes its own steps.
        state: state before the first step; in a narrow type, before the next.
        steps_done: steps taken.
        routed: what each router has selected in the latest step, here and in perturbed models.
    """

    def __init__(self, case: Case, device: torch.device, start: int = 0) -> None:
        """Build the reference, and take the first `start` steps."""
        self._case, self._device = case, device
        self._dtype = case.torch_dtype
        self._draws = torch.get_rng_state()
        self.begin: StepRecord | None = None
        self.steps_done = start
        self.routed: list[dict[str, Routed]] = []
        with self._drawing():
            self._run = ReferenceRun(case, device)
            self._steps = self._run.steps()
            for _ in range(start):
                next(self._steps)
        self.state = self._run.state()

    @contextmanager
    def _drawing(self) -> Generator[None]:
        """Draw from a generator of the reference; the ranks' run draws from the process's own."""
        of_ranks = torch.get_rng_state()
        torch.set_rng_state(self._draws)
        yield
        self._draws = torch.get_rng_state()
        torch.set_rng_state(of_ranks)

    def compare(self, step: int, ours: StepRecord) -> list[Difference]:
        """Take a step of the reference, and compare it with the ranks' record `ours`."""
        self.steps_done += 1
        with self._drawing():
            return self._compared(step, ours)

    def _compared(self, step: int, ours: StepRecord) -> list[Difference]:
        if self._dtype == torch.float64:
            found = compare_step(step, ours, next(self._steps))
            self.routed = [self._run.routed()]
            return found
        self.begin, self.state = {**self.state, ROUTING: ours.get(ROUTING, {})}, ours
        self.routed = []
        made, *moved = (self._computed(step, seed) for seed in (0, *PERTURBATIONS))
        found = self._beside_wider(step, ours, compare_step(step, ours, made, moved, self._dtype))
        self._run.begin_from(self.begin)
        self._run.take_gradients(ours["gradient"])
        return found + compare_update(
            step, ours, self._run.update(step, ours), self.begin, self._dtype
        )

    def evaluated(self, routes: Values) -> tuple[Tensor, list[Tensor]]:
        """Return the output on the last batch in `eval()`, and the outputs of perturbed models.

        In a narrow type routers select the experts in `routes`, as the ranks have.
        """
        with self._drawing():
            if self._dtype == torch.float64:
                return self._run.evaluate(), []
            self.begin = {**self.state, ROUTING: routes}
            made: list[Tensor] = []
            for seed in (0, *PERTURBATIONS):
                self._run.begin_from(self.begin, seed)
                made.append(self._run.evaluate())
            return made[0], made[1:]

    @torch.no_grad()
    def validated(self, validate: Callable[[nn.Module], float]) -> float:
        """Return the mean loss of the validation data in `eval()`; draws leave training's alone."""
        with torch.random.fork_rng(devices=[]), evaluating(self._run.model):
            torch.set_rng_state(self._draws)
            return validate(self._run.model)

    def _beside_wider(
        self, step: int, ours: StepRecord, rows: list[Difference]
    ) -> list[Difference]:
        """Replace the errors that fail by errors against the next wider type, where these pass."""
        if all(row.passes for row in rows):
            return rows
        assert self.begin is not None
        self._wider.begin_from(self.begin)
        beside = compare_step(step, ours, self._wider.compute(step))
        errors = {(row.quantity, row.name): row.error for row in beside}
        return [
            dataclasses.replace(row, error=error, problem="", ratio=None)
            if not row.passes
            and (error := errors.get((row.quantity, row.name), math.inf)) <= row.limit
            else row
            for row in rows
        ]

    @cached_property
    def _wider(self) -> ReferenceRun:
        """The reference in the next wider type, with batches rounded to the case's type."""
        batches = [cast_batch(batch, self._dtype, self._device) for batch in self._case.batches]
        wider = dataclasses.replace(self._case, dtype=_WIDER[self._case.dtype], batches=batches)
        with torch.random.fork_rng(devices=()):
            return ReferenceRun(wider, self._device)

    def _computed(self, step: int, perturbation: int = 0) -> StepRecord:
        assert self.begin is not None
        self._run.begin_from(self.begin, perturbation)
        made = self._run.compute(step)
        self.routed.append(self._run.routed())
        return made


def within(limit: float, row: Difference, error: float | None = None) -> Difference:
    """Return a difference with another limit, and with another error unless None."""
    return dataclasses.replace(row, limit=limit, error=row.error if error is None else error)


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the difference with the largest error relative to its limit."""
    return max(differences, key=lambda each: each.error / each.limit if each.limit else each.error)
