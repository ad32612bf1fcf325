"""The profile of a user's loop: where its steps begin and end, and which phase a line belongs to.

    for x, y in loader:              data, until the batch is there
        loss = f(model(x), y)        forward
        run.backward(loss)           backward
        run.clip(1.0)                clip
        optimizer.step()             optimizer; the step ends if all optimizers have stepped
    validate(), run.save(...)        in no step

A step begins as a loader is asked for a training batch, or else as the model is called.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.comm.ranges import named
from phalanx.config.profile_options import ProfileOptions
from phalanx.launch.failure import report
from phalanx.measure.profile import Profile
from phalanx.train.step import TERMS

if TYPE_CHECKING:
    from phalanx.script.loop_step import LoopStep
    from phalanx.script.prepare import Prepared


class LoopProfile:
    """Steps a `Profile` by the calls of `LoopStep` and of the loaders."""

    def __init__(
        self, folder: Path, prepared: Prepared, options: ProfileOptions, model: nn.Module,
        step: LoopStep,
    ) -> None:  # fmt: skip
        """Observe the next steps; every rank calls this together."""
        job, compiled = prepared.job, (each._compiled_call_impl for each in model.modules())  # pyright: ignore[reportPrivateUsage]
        self._profile = Profile(
            folder, job.comm, job.strategy, options, model=model, phases=TERMS, say=report,
            # The memory of compiled code is not seen.
            optimizers=None if any(compiled) else prepared.optimizers,
        )  # fmt: skip
        self._step, self._phase, self._is_open = step, "", False
        self._range = ExitStack()

    def enter(self, phase: str) -> None:
        """Enter a phase of the step, and leave the one before; begin a step if none is open."""
        self._range.close()
        if self._is_open and self._phase == phase == "data":  # the pass before ended without it
            self._is_open = False
        if phase and not self._is_open:
            self._is_open = True
            self._profile.begin_step(self._step.steps_done + 1)
        self._phase = phase
        if phase in ("forward", "backward"):
            self._range.enter_context(named(f"microbatch {self._step.num_backwards}"))
        if phase:
            self._range.enter_context(named(phase))

    def end_step(self) -> None:
        """End the step, if one is open."""
        if self._is_open:
            self.enter("")
            self._is_open = False
            self._profile.end_step()

    def _before_forward(self, _: nn.Module, __: Any) -> None:
        if torch.is_grad_enabled() and self._phase not in ("forward", "backward"):
            self.enter("forward")

    @contextmanager
    def observing(self, model: nn.Module) -> Generator[None]:
        """Observe the steps inside, of `model`."""
        hook = model.register_forward_pre_hook(self._before_forward, prepend=True)
        self._step.profile, is_failed = self, True
        try:
            yield
            is_failed = False
        finally:
            hook.remove()
            self._step.profile = None
            self._range.close()
            self._profile.close(is_failed=is_failed)
