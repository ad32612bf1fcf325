"""What a run calls after its steps and evaluations: a user's own code within the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from phalanx.checkpoint.registered import Registered
from phalanx.comm.together import max_over_ranks
from phalanx.errors import ConfigError
from phalanx.train.evaluate import Evaluation
from phalanx.train.step import StepResult

Log = Callable[[str, Mapping[str, Any]], object]
"""Called on the first rank with each record of a run: its kind, such as "step", and its values."""


class Callback:
    """Called on all ranks alike; a subclass overrides what it needs.

    One with `state_dict` and `load_state_dict` is saved and resumed with the run, as
    `Run.register` says.
    """

    def begin(self, model: nn.Module) -> None:
        """Look at the model, which is split, before the first step and before a resume."""

    def step(self, steps_done: int, result: StepResult) -> bool | None:
        """Look at a step that has been taken; True ends the run after it, on all ranks."""

    def evaluation(self, evaluation: Evaluation) -> bool | None:
        """Look at an evaluation; True ends the run, on all ranks."""


@dataclass(frozen=True)
class Extras:
    """Callbacks and a logger, called within a run.

    Attributes:
        callbacks: by names, under which checkpoints hold their states.
        log: is given each record.
    """

    callbacks: Mapping[str, Callback] = field(default_factory=dict[str, Callback])
    log: Log | None = None

    def check(self) -> None:
        """Refuse what cannot be called.

        Raises:
            ConfigError: says what it is.
        """
        for name, callback in self.callbacks.items():
            if not isinstance(callback, Callback):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"callbacks: '{name}' is a {type(callback).__name__}; expected an object of a "
                    "subclass of phalanx.Callback"
                )
        if self.log is not None and not callable(self.log):
            raise ConfigError(f"log is a {type(self.log).__name__}; expected a function")


class Called:
    """The callbacks of a run on this rank.

    Attributes:
        registered: the callbacks that have a state.
    """

    def __init__(self, extras: Extras, model: nn.Module) -> None:
        """Have them look at the model."""
        extras.check()
        self._callbacks = extras.callbacks
        self.registered = Registered()
        for name, callback in self._callbacks.items():
            callback.begin(model)
            if hasattr(callback, "state_dict"):
                self.registered.add(name, callback)

    def step(self, steps_done: int, result: StepResult) -> bool:
        """Return whether one of any rank ends the run; all ranks call this together."""
        return self._agreed(each.step(steps_done, result) for each in self._of("step"))

    def evaluation(self, evaluation: Evaluation) -> bool:
        """Return whether one of any rank ends the run; all ranks call this together."""
        return self._agreed(each.evaluation(evaluation) for each in self._of("evaluation"))

    def _of(self, method: str) -> list[Callback]:
        """Return those that have a method of their own."""
        original = getattr(Callback, method)
        return [c for c in self._callbacks.values() if getattr(type(c), method) is not original]

    def _agreed(self, answers: Iterator[bool | None]) -> bool:
        found = [int(bool(answer)) for answer in answers]
        return bool(found) and max_over_ranks([max(found)])[0] > 0
