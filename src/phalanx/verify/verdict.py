"""Verdict of `verify`: whether a strategy and one process agree; if not, where and why they differ.

For a run that dies, the verdict names the failed rank and the module that it was in.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from phalanx.comm.ledger import Entry
from phalanx.errors import PhalanxError, RankFailed
from phalanx.verify.compare import Difference, worst
from phalanx.verify.settings import EVALUATION, QUANTITIES, VALIDATION
from phalanx.verify.snapshot import BitsKey, Snapshot, owner


@dataclass(frozen=True)
class Place:
    """Place at which the first difference arises.

    Attributes:
        module: name of the module at fault; "" is the model itself, outside its submodules; None
            is outside the model.
        what: description of the difference.
        step: number of the step, from 0; None if `what` contains the step, or there is none.
        rank: rank with the largest error, if known.
        microbatch: microbatch of this error, if known.
    """

    module: str | None
    what: str
    step: int | None = None
    rank: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        if self.step is None:
            return self.what
        where = "" if self.rank is None else f", most on rank {self.rank}"
        if self.microbatch is not None:
            where += f", microbatch {self.microbatch}"
        return f"{self.what} (step {self.step}{where})"


@dataclass(frozen=True)
class Sent:
    """Bytes of one kind of collective in the last step.

    Attributes:
        counted: bytes of the full tensors, by the ledger.
        predicted: bytes of the full tensors, by the strategy's own account; None if the account
            lacks this collective, as for messages between stages of a user's module.
        is_exact: whether a difference is an error; not for modules of the user, which may run a
            block twice, or not at all.
    """

    phase: str
    axis: str
    op: str
    counted: int
    predicted: int | None
    is_exact: bool = True

    def __str__(self) -> str:
        predicted = "not" if self.predicted is None else f"{self.predicted:,}"
        return (
            f"{self.op} over {self.axis} in {self.phase}: {self.counted:,} bytes counted, "
            f"{predicted} predicted"
        )


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of a strategy with one process.

    Attributes:
        strategy: name of the strategy, or title of the run.
        differences: all comparisons, equal ones included, in the order of the computation, up to
            the end of the first step that differs.
        replicas: differences between ranks that must have the same bits, and faults of the run.
        sent: bytes that rank 0 sent in the last step, with the predictions.
        entries: the ledger's entries for these bytes.
        place: place of the first difference, if there is one and it was located.
        causes: likely causes, in sentences.
        case: name of the case; empty if there is only one.
        failure: traceback of the rank that failed first; empty if the run finished.
        notes: what the comparison leaves out, in sentences.
    """

    strategy: str
    differences: list[Difference] = field(repr=False)
    replicas: list[str] = field(default_factory=list[str])
    sent: list[Sent] = field(default_factory=list[Sent], repr=False)
    entries: list[Entry] = field(default_factory=list[Entry], repr=False)
    place: Place | None = None
    causes: list[str] = field(default_factory=list[str])
    case: str = ""
    failure: str = field(default="", repr=False)
    notes: list[str] = field(default_factory=list[str])

    @property
    def first(self) -> Difference | None:
        """The first quantity, in the order of the computation, that differs."""
        return next((d for d in self.differences if not d.passes), None)

    @property
    def wrong_bytes(self) -> list[Sent]:
        """Collectives whose bytes differ from a prediction that is exact."""
        return [row for row in self.sent if row.is_exact and row.counted != row.predicted]

    @property
    def is_equal(self) -> bool:
        """Whether the run finished and all values, replicas and exact predictions agree."""
        is_whole = not self.failure and not self.wrong_bytes
        return is_whole and self.first is None and not self.replicas

    def largest_errors(self) -> dict[str, float]:
        """Return the largest error of each quantity that was compared."""
        errors = {
            what: [d.error for d in self.differences if d.quantity == what] for what in QUANTITIES
        }
        return {what: max(found) for what, found in errors.items() if found}

    def __str__(self) -> str:
        return "\n".join([self.headline(), *self.details()])

    def headline(self) -> str:
        """Return the verdict in a sentence."""
        if self.failure:
            return f"{self.strategy} does not finish, but one process does"
        if self.first is not None:
            return f"{self.strategy} differs from one process, first at {self.first}"
        if self.replicas:
            return f"{self.strategy}: ranks differ from one process, or from one another"
        if self.wrong_bytes:
            return f"{self.strategy} sends more or fewer bytes than predicted"
        far, not_finite = worst(self.differences), ""
        if rows := [row for row in self.differences if row.both]:
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            not_finite = f", {rows[0].both} in both (step {rows[0].step}, {rows[0].what}{more})"
        return (
            f"{self.strategy} computes what one process computes{not_finite}: the worst of "
            f"{len(self.differences)} errors is {far.error:.1e} ({far.what}), at most "
            f"{far.limit:.0e} passes"
        )

    @property
    def num_steps(self) -> int:
        """Number of steps that were compared."""
        return 1 + max((row.step for row in self.differences), default=-1)

    def details(self) -> list[str]:
        """Return lines with the place of the difference, replicas, bytes, causes and traceback."""
        lines = [] if self.place is None else [f"where: {self.place}"]
        lines += [f"ranks: {line}" for line in self.replicas[:3]]
        lines += [f"bytes: {row}" for row in self.wrong_bytes[:3]]
        lines += [f"likely cause: {cause}" for cause in self.causes]
        lines += [f"note: {note}" for note in self.notes]
        return lines + self.failure.splitlines()


def verdict_of(
    title: str,
    differences: list[Difference],
    problems: Sequence[Place],
    unequal: Sequence[Place],
    notes: Sequence[str] = (),
) -> Verdict:
    """Return the verdict on differences, on other faults of a run, and on unequal replicas."""
    replicas = [each.what for each in problems]
    replicas += [f"step {each.step}: {each.what}" for each in unequal]
    place = next(iter(problems), None)
    wrong = [row for row in differences if not row.passes]
    first = next((row for row in wrong if row.quantity != VALIDATION), next(iter(wrong), None))
    if place is None and first is not None:
        module = None if first.quantity in _OF_ALL else owner(first.name)
        what = f"{first.what} is the first quantity that differs; all earlier ones agree"
        place = Place(module, what, first.step)
    place = place or next(iter(unequal), None)
    return Verdict(title, differences, replicas, place=place, notes=[*notes])


_OF_ALL = ("loss", "norm", "learning rate", EVALUATION, VALIDATION)
"""Quantities of the whole model or run, which belong to no module."""

MARK = "verify stood at "
"""Prefix of the note that `Whereabouts` adds to an error; JSON follows."""


class Whereabouts:
    """Context manager that tracks the current step, phase and module of a case on this rank."""

    def __init__(self, case: str = "") -> None:
        self.case = case
        self.step: int | None = None
        self._phase = ""
        self._stack: list[str] = []

    def __enter__(self) -> Whereabouts:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Add a note with the current place to an error that is not a PhalanxError."""
        if error is not None and not isinstance(error, PhalanxError):
            at = {"case": self.case, "step": self.step, "phase": self._phase}
            at["module"] = self._stack[-1] if self._stack else None
            error.add_note(MARK + json.dumps(at))

    def follow(self, model: nn.Module) -> None:
        """Register hooks that track the modules of a model that has been split."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(self._leave)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Track a phase of the step; after an error the phase stays set."""
        self._phase = name
        self._stack.clear()
        yield
        self._phase = ""

    def _enter(self, name: str, *_: Any) -> None:
        self._stack.append(name)

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()


def failed(strategy: str, failure: RankFailed) -> Verdict:
    """Return the verdict on a run that died, with the rank that failed and its module."""
    lines = failure.traceback.rstrip().splitlines()
    notes = [line for line in lines if line.startswith(MARK)]
    at = json.loads(notes[0].removeprefix(MARK)) if notes else {}
    lines = [line for line in lines if line not in notes]
    own = [line for line in lines if line and not line.startswith(" ")]
    error = own[-1] if own else "without a message"
    module, step = at.get("module"), at.get("step")
    where = f"the {at['phase']}" if at.get("phase") else "the code outside the steps"
    if module is not None:
        where += f" of {module or 'the model'}"
    when = "" if step is None else f" of step {step}"
    what = f"rank {failure.rank} fails in {where}{when}: {error}"
    place = Place(module, what, None, failure.rank)
    text = "\n".join(lines)
    return Verdict(strategy, [], place=place, case=at.get("case", ""), failure=text)


def unequal_ranks(step: int, facts: Sequence[Snapshot]) -> list[Place]:
    """Return differences between ranks in values that must be equal, roughly in order of a step."""
    norms = [
        (f"the {p}-norm of the gradient", [rank.numbers["norm"][p] for rank in facts])
        for p in facts[0].numbers.get("norm", {})
    ]
    found = unequal_replicas(step, facts)
    for what, numbers in (("the loss", [rank.numbers["loss"][""] for rank in facts]), *norms):
        # Unlike the numbers, the texts of two NaNs are equal.
        odd = [rank for rank, number in enumerate(numbers) if repr(number) != repr(numbers[0])]
        if odd:
            text = f"{what} is {numbers[0]:.17g} on rank 0 and {numbers[odd[0]]:.17g} on rank "
            at = 0 if what == "the loss" else len(found)
            found.insert(at, Place(None, f"{text}{odd[0]}", step, odd[0]))
    return found


def unequal_replicas(step: int, facts: Sequence[Snapshot], but: str = "") -> list[Place]:
    """Return the gradients that a rank lacks, and the tensors that differ from their replicas.

    Replicas of the quantity `but` are not compared.
    """
    found: list[Place] = []
    # A rank is only compared for parameters that it has: a pipeline stage has some of them.
    held, trained = (
        [{name for kind, name, _ in rank.bits if kind == wanted} for rank in facts]
        for wanted in ("weight", "gradient")
    )
    for name in sorted(set[str]().union(*trained)):
        without = [r for r, names in enumerate(trained) if name in held[r] and name not in names]
        if without:
            what = f"{name} has a gradient on some ranks, but none on rank {without[0]}"
            found.append(Place(owner(name), what, step, without[0]))
    first: dict[BitsKey, tuple[int, str]] = {}
    seen: set[tuple[str, str]] = set()
    for number, rank in enumerate(facts):
        for key, digest in rank.bits.items():
            quantity, name, _ = key
            holder, other = first.setdefault(key, (number, digest))
            if other != digest and (quantity, name) not in seen and quantity != but:
                seen.add((quantity, name))
                where = f"on rank {number} differs from its replica on rank {holder}"
                what = f"the {quantity} of {name} {where}"
                found.append(Place(owner(name), what, step, number))
    return found
