"""Track the best evaluation of a run by a measure, and stop early when it does not improve."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from phalanx.config.schema import RunConfig
from phalanx.config.validate import check_best
from phalanx.errors import ConfigError
from phalanx.train.evaluate import Evaluation

LOSS = "min:loss"
"""Measure by which evaluations are compared if `best` is not set."""


@dataclass
class BestTracker:
    """Tracks the best evaluation; the state is equal on all ranks.

    Attributes:
        measure: "min:loss", or "min:" or "max:" and the name of a metric.
        patience: evaluations without improvement after which the run ends; None: no early stop.
        value: measure of the best evaluation; None before the first.
        step: steps taken before the best evaluation.
        num_worse: evaluations since the best one.
        judged: steps taken before the latest evaluation that was compared; a resumed run repeats
            that evaluation, which is then ignored.
    """

    measure: str
    patience: int | None = None
    value: float | None = None
    step: int = 0
    num_worse: int = 0
    judged: int = -1

    def take(self, evaluation: Evaluation) -> bool:
        """Compare an evaluation with the best; return whether it is the best so far.

        An evaluation whose measure is NaN is never the best.

        Raises:
            ConfigError: the evaluation does not have the measure.
        """
        if evaluation.step <= self.judged:
            return False
        self.judged = evaluation.step
        direction, _, name = self.measure.partition(":")
        measures = {"loss": evaluation.loss, **evaluation.metrics}
        if name not in measures:
            raise ConfigError(
                f"best is {self.measure}, but an evaluation measures {', '.join(measures)}; "
                f"expected one of these names after {direction}:"
            )
        value, sign = measures[name], -1 if direction == "max" else 1
        is_better = self.value is None or sign * value < sign * self.value
        if math.isnan(value) or not is_better:
            self.num_worse += 1
            return False
        self.value, self.step, self.num_worse = value, evaluation.step, 0
        return True

    @staticmethod
    def of(config: RunConfig) -> BestTracker | None:
        """Return the tracker for the settings of a run; None if `best` and `patience` are unset.

        Raises:
            ConfigError: the measure is not valid.
        """
        if config.best is None and config.patience is None:
            return None
        check_best(config)
        return BestTracker(config.best or LOSS, config.patience)

    @property
    def is_over(self) -> bool:
        """Whether `patience` evaluations without improvement have passed, which ends the run."""
        return self.patience is not None and self.num_worse >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a manifest."""
        state = dataclasses.asdict(self)
        del state["patience"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, unless it is of another measure."""
        if state["measure"] == self.measure:
            for name, value in state.items():
                setattr(self, name, value)

    def text(self) -> str:
        """Describe the best evaluation, and whether the run ended early."""
        if self.value is None:
            return f"{self.measure}: no evaluation gave a number"
        end = f"; the run ended because {self.num_worse} evaluations since then were no better"
        found = f"{self.measure} {self.value:.4f} after step {self.step}"
        return found + (end if self.is_over else "")
