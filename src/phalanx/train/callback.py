"""Callbacks and loggers: a user's code that a run calls after its steps and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from phalanx.checkpoint.registered import Registered
from phalanx.comm.together import max_over_ranks
from phalanx.errors import ConfigError
from phalanx.train.evaluate import Evaluation
from phalanx.train.step import StepResult

Log = Callable[[str, Mapping[str, Any]], object]
"""Called on rank 0 with each record of a run: its kind, such as "step", and its values."""


class Callback:
    """Base class of callbacks, which are called on every rank; override the methods you need.

    A callback with `state_dict` and `load_state_dict` is saved and resumed with the run, see
    `Run.register`.
    """

    def begin(self, model: nn.Module) -> None:
        """Receive the sharded model, before a checkpoint is loaded and before the first step."""

    def step(self, steps_done: int, result: StepResult) -> bool | None:
        """Receive the result of a step; return True on any rank to end the run after the step."""

    def evaluation(self, evaluation: Evaluation) -> bool | None:
        """Receive an evaluation; return True on any rank to end the run."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks and the logger of a run.

    Attributes:
        callbacks: callbacks by name; checkpoints store their states under these names.
        log: logger, called with each record.
    """

    callbacks: Mapping[str, Callback] = field(default_factory=dict[str, Callback])
    log: Log | None = None

    def check(self) -> None:
        """Check the types of the callbacks and the logger.

        Raises:
            ConfigError: a callback is not a `Callback`, or the logger is not callable.
        """
        if not isinstance(cast(Any, self.callbacks), Mapping) or any(
            not isinstance(cast(Any, name), str) for name in self.callbacks
        ):
            raise ConfigError(f"callbacks: {self.callbacks!r}; expected a dict by name")
        for name, callback in self.callbacks.items():
            if not isinstance(callback, Callback):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"callbacks: '{name}' is a {type(callback).__name__}; expected an object of a "
                    "subclass of phalanx.Callback"
                )
        if self.log is not None and not callable(self.log):
            raise ConfigError(f"log is a {type(self.log).__name__}; expected a function")


class CallbackRunner:
    """The callbacks of a run on this rank.

    Attributes:
        registered: the callbacks that have a state.
    """

    def __init__(self, extras: Callbacks, model: nn.Module) -> None:
        """Call `begin` of each callback, and register each callback that has a state."""
        extras.check()
        self._callbacks = extras.callbacks
        self.registered = Registered()
        for name, callback in self._callbacks.items():
            callback.begin(model)
            if hasattr(callback, "state_dict"):
                self.registered.add(name, callback)

    def step(self, steps_done: int, result: StepResult) -> bool:
        """Call the callbacks; return whether one of any rank ends the run. All ranks call this."""
        return self._ends_run("step", steps_done, result)

    def evaluation(self, evaluation: Evaluation) -> bool:
        """Call the callbacks; return whether one of any rank ends the run. All ranks call this."""
        return self._ends_run("evaluation", evaluation)

    def _ends_run(self, method: str, *args: Any) -> bool:
        # Only of classes that override the method: without any, the ranks need not agree.
        plain = getattr(Callback, method)
        called = [c for c in self._callbacks.values() if getattr(type(c), method) is not plain]
        answers = [int(bool(getattr(each, method)(*args))) for each in called]
        return bool(answers) and max_over_ranks([max(answers)])[0] > 0
