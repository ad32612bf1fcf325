"""The best checkpoint of a run by a measure of its evaluations, and when there is none to come."""

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
"""What evaluations are judged by where nothing is said."""


@dataclass
class Best:
    """Judges evaluations, alike on all ranks.

    Attributes:
        measure: "min:loss", or "min:" or "max:" and the name of a metric.
        patience: evaluations without a better one after which the run ends; None: it never does.
        value: of the best evaluation; None before the first.
        step: steps taken before it.
        num_worse: evaluations since then.
        judged: steps before the last one that was judged; a resumed run makes it again.
    """

    measure: str
    patience: int | None = None
    value: float | None = None
    step: int = 0
    num_worse: int = 0
    judged: int = -1

    def take(self, evaluation: Evaluation) -> bool:
        """Judge an evaluation; return whether it is the best so far.

        One that is not a number is never the best.

        Raises:
            ConfigError: the evaluation has no such measure.
        """
        if evaluation.step <= self.judged:
            return False
        self.judged = evaluation.step
        direction, _, name = self.measure.partition(":")
        measures = {"loss": evaluation.loss, **evaluation.metrics}
        if name not in measures:
            raise ConfigError(
                f"best is {self.measure}, but an evaluation has {', '.join(measures)}; expected "
                f"one of these after {direction}:"
            )
        value, sign = measures[name], -1 if direction == "max" else 1
        is_better = self.value is None or sign * value < sign * self.value
        if math.isnan(value) or not is_better:
            self.num_worse += 1
            return False
        self.value, self.step, self.num_worse = value, evaluation.step, 0
        return True

    @staticmethod
    def of(config: RunConfig) -> Best | None:
        """Return what judges the evaluations of a run; None if nothing is asked.

        Raises:
            ConfigError: the measure cannot be read.
        """
        if config.best is None and config.patience is None:
            return None
        check_best(config)
        return Best(config.best or LOSS, config.patience)

    @property
    def is_over(self) -> bool:
        """Whether enough evaluations were worse to end the run."""
        return self.patience is not None and self.num_worse >= self.patience

    def state(self) -> dict[str, Any]:
        """Return where it stands, for a manifest."""
        state = dataclasses.asdict(self)
        del state["patience"]
        return state

    def load(self, state: dict[str, Any] | None) -> None:
        """Take up what `state` returned, unless it is of another measure."""
        if state is not None and state["measure"] == self.measure:
            for name, value in state.items():
                setattr(self, name, value)

    def text(self) -> str:
        """Return which evaluation is the best."""
        if self.value is None:
            return f"{self.measure} was never a number"
        end = f"; the run ended, as the {self.num_worse} evaluations since are no better"
        found = f"{self.measure} {self.value:.4f} after step {self.step}"
        return found + (end if self.is_over else "")
