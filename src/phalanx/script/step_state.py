"""The states of a step that a script drives, and the calls that each of them refuses.

    IDLE --begin--> ACCUMULATING --complete--> WHOLE --begin, of the next step--> ACCUMULATING
      ^                  |                       |
      +------ reset -----+-----------------------+       a backward that failed, or a resume

Optimizers step while the gradients are WHOLE, each of them once.
"""

from __future__ import annotations

import enum

from phalanx.errors import ScriptError


class State(enum.Enum):
    """Of which batches the gradients are."""

    IDLE = "of none: no backward has begun a step"
    ACCUMULATING = "of some microbatches of a step, and not added up over the ranks yet"
    WHOLE = "of a whole global batch"


class StepState:
    """Where the step under way stands.

    Attributes:
        state: of which batches the gradients are.
        num_backwards: calls of `run.backward` that the step has had; 0 unless it is accumulating.
        steps_done: steps that an optimizer has taken, those before a resume too.
    """

    def __init__(self, accumulation: int) -> None:
        self.state = State.IDLE
        self.num_backwards = 0
        self.steps_done = 0
        self._accumulation = accumulation
        self._stepped: set[int] = set()

    @property
    def is_used(self) -> bool:
        """Whether an optimizer has stepped since the last `begin`."""
        return bool(self._stepped)

    @property
    def is_full(self) -> bool:
        """Whether the step has all its backwards."""
        return self.num_backwards == self._accumulation

    def begin(self) -> None:
        """Begin a step: its gradients are cleared."""
        self.state = State.ACCUMULATING
        self._stepped.clear()

    def complete(self) -> None:
        """Note that the gradients are whole."""
        self.num_backwards, self.state = 0, State.WHOLE

    def reset(self) -> None:
        """Give up the step under way; the next backward begins one."""
        self.num_backwards, self.state = 0, State.IDLE

    def note_step(self, optimizer: object) -> None:
        """Note that an optimizer has stepped."""
        self.steps_done += not self._stepped
        self._stepped.add(id(optimizer))

    def refuse_clip(self) -> None:
        """Refuse to clip gradients that are not whole."""
        if self.state is not State.WHOLE:
            raise ScriptError(
                "clip: there are no gradients of a whole step; call it after the last run.backward "
                "of a step and before optimizer.step()"
            )

    def refuse_save(self, *, is_skipped: bool) -> None:
        """Refuse to save gradients, which no checkpoint keeps."""
        is_unused = self.state is State.WHOLE and not self.is_used and not is_skipped
        if self.state is State.ACCUMULATING or is_unused:
            raise ScriptError(
                "save: between run.backward and optimizer.step(), whose gradients no checkpoint "
                "keeps, while their batches count as taken; save after the step"
            )

    def refuse_step(self, optimizer: object, *, has_gradients: bool) -> None:
        """Refuse an optimizer's step whose gradients are not of the global batch."""
        is_due = self.state is State.WHOLE and id(optimizer) not in self._stepped
        if self.state is State.ACCUMULATING:
            raise ScriptError(
                f"optimizer.step() after {self.num_backwards} of {self._accumulation} calls of "
                "run.backward: the gradients are not added up over the ranks yet; step when all "
                f"are made, or say accumulation={self.num_backwards} to phalanx.init"
            )
        if is_due and not has_gradients:
            raise ScriptError(
                "optimizer.step() without a gradient: zero_grad() came between run.backward "
                "and the step; call it after the step, or before run.backward"
            )
        if not is_due and (self.state is State.WHOLE or not has_gradients):
            raise ScriptError(
                "optimizer.step() without a run.backward since its last step; call "
                "run.backward(loss_sum, count) before it"
            )
        if not is_due:
            raise ScriptError(
                "optimizer.step() with gradients of this rank alone: loss.backward() was called, "
                "which adds nothing up over the ranks; call run.backward(loss_sum, count) in its "
                "place"
            )
