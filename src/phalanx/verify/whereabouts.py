"""Where a rank stands in a case, so that a run that dies says in which module."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from phalanx.errors import PhalanxError, RankFailed
from phalanx.verify.verdict import Place, Verdict

MARK = "verify stood at "
"""What the note on an error begins with; JSON follows."""


class Whereabouts:
    """Follows the modules and phases of a case on this rank.

    Attributes:
        case: its name.
        step: under way; None before the first.
    """

    def __init__(self, case: str = "") -> None:
        self.case = case
        self.step: int | None = None
        self._phase = ""
        self._stack: list[str] = []

    def __enter__(self) -> Whereabouts:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Note on an error, if it is no user's to mend, where the rank stands."""
        if error is not None and not isinstance(error, PhalanxError):
            error.add_note(self._note())

    def follow(self, model: nn.Module) -> None:
        """Follow the modules of a model that has been split."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(self._leave)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Be told the phases of a step; the last one stays where an error leaves it."""
        self._phase = name
        self._stack.clear()
        yield
        self._phase = ""

    def _note(self) -> str:
        at = {"case": self.case, "step": self.step, "phase": self._phase}
        return MARK + json.dumps(at | {"module": self._stack[-1] if self._stack else None})

    def _enter(self, name: str, *_: Any) -> None:
        self._stack.append(name)

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()


def failed(strategy: str, failure: RankFailed) -> Verdict:
    """Return the verdict on a run that died, with the module and rank."""
    lines = failure.traceback.rstrip().splitlines()
    notes = [line for line in lines if line.startswith(MARK)]
    at = json.loads(notes[0].removeprefix(MARK)) if notes else {}
    lines = [line for line in lines if line not in notes]
    own = [line for line in lines if line and not line.startswith(" ")]
    error = own[-1] if own else "without a word"
    module, step = at.get("module"), at.get("step")
    where = f"the {at['phase']}" if at.get("phase") else "the work around the steps"
    if module is not None:
        where += f" of {module or 'the model'}"
    when = "" if step is None else f" of step {step}"
    what = f"rank {failure.rank} fails in {where}{when}: {error}"
    place = Place(module, what, None, failure.rank)
    text = "\n".join(lines)
    return Verdict(strategy, [], place=place, case=at.get("case", ""), failure=text)
