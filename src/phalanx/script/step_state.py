"""The states of a step in a user's loop, and the calls that each state refuses.

    IDLE --begin--> ACCUMULATING --complete--> REDUCED --begin the next step--> ACCUMULATING
      ^                  |                       |
      +------ reset -----+-----------------------+       after a failed backward, or a resume

Each optimizer may step once while the state is REDUCED.
"""

from __future__ import annotations

import enum

from phalanx.errors import ScriptError


class State(enum.Enum):
    """Which microbatches the current gradients include."""

    IDLE = "of none: no backward has begun a step"
    ACCUMULATING = "of some microbatches of a step, and not added up over the ranks yet"
    REDUCED = "of a whole global batch"


class StepState:
    """State machine of the current step.

    Attributes:
        state: which microbatches the current gradients include.
        num_backwards: calls of `run.backward` in the current step; 0 unless it is ACCUMULATING.
        steps_done: optimizer steps taken, including the steps before a resume.
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
        """Whether the step has had `accumulation` calls of `run.backward`."""
        return self.num_backwards == self._accumulation

    def begin(self) -> None:
        """Start a step, after its gradients were cleared."""
        self.state = State.ACCUMULATING
        self._stepped.clear()

    def complete(self) -> None:
        """Record that the gradients of the step are complete and reduced."""
        self.num_backwards, self.state = 0, State.REDUCED

    def reset(self) -> None:
        """Abandon the current step; the next backward starts a new step."""
        self.num_backwards, self.state = 0, State.IDLE

    def note_step(self, optimizer: object) -> None:
        """Record that `optimizer` has stepped; several optimizers count as one step."""
        self.steps_done += not self._stepped
        self._stepped.add(id(optimizer))

    def refuse_clip(self) -> None:
        """Refuse to clip unless the state is REDUCED."""
        if self.state is not State.REDUCED:
            raise ScriptError(
                "clip: there are no gradients of a complete step; call run.clip after the last "
                "run.backward of a step and before optimizer.step()"
            )

    def refuse_save(self, *, is_skipped: bool) -> None:
        """Refuse a save that would lose gradients, because checkpoints do not store them."""
        is_unused = self.state is State.REDUCED and not self.is_used and not is_skipped
        if self.state is State.ACCUMULATING or is_unused:
            raise ScriptError(
                "save: called between run.backward and optimizer.step(); a checkpoint does not "
                "store these gradients, but counts their batches as used; save after the step"
            )

    def refuse_step(self, optimizer: object, *, has_gradients: bool) -> None:
        """Refuse an optimizer's step unless its gradients are new and of the global batch."""
        is_due = self.state is State.REDUCED and id(optimizer) not in self._stepped
        if self.state is State.ACCUMULATING:
            raise ScriptError(
                f"optimizer.step() after {self.num_backwards} of {self._accumulation} calls of "
                "run.backward: the gradients are not summed over the ranks yet; step after the "
                f"last call, or give accumulation={self.num_backwards} to phalanx.init"
            )
        if is_due and not has_gradients:
            raise ScriptError(
                "optimizer.step() without a gradient: zero_grad() came between run.backward "
                "and the step; call it after the step, or before run.backward"
            )
        if not is_due and (self.state is State.REDUCED or not has_gradients):
            raise ScriptError(
                "optimizer.step() without a run.backward since its last step; call "
                "run.backward(loss) before it"
            )
        if not is_due:
            raise ScriptError(
                "optimizer.step() with gradients of this rank alone: loss.backward() was called, "
                "which adds nothing up over the ranks; call run.backward(loss) in its place"
            )
