"""The automatic choice of strategy and microbatch, with the nearest rejected alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.planner.explain import neighbours
from phalanx.planner.machine import Cluster
from phalanx.planner.search import Candidate, Inequality, OfDecoder, price_microbatches, search
from phalanx.report.units import time_text
from phalanx.strategy import Strategy

NUM_REJECTED = 2
"""Number of rejected alternatives that are reported."""


@dataclass(frozen=True)
class Choice:
    """The fastest strategy and microbatch that fit.

    Attributes:
        rejected: the nearest alternatives, which need too much memory or are slower.
    """

    best: Candidate
    rejected: tuple[Inequality, ...]
    cluster: Cluster

    def lines(self) -> list[str]:
        """Return lines of text: the choice, the rejected alternatives and the machine."""
        planned, device = self.best.planned, self.cluster.device
        link = self.cluster.levels[0].link
        return [
            f"auto: {planned.strategy} with microbatch {planned.microbatch} x "
            f"{planned.accumulation}, predicted {time_text(self.best.price.step_s)} a step before "
            "the run",
            *(f"  not {each}" for each in self.rejected),
            f"  planned on {self.cluster.num_devices} x {device.title}: {device.source}, "
            f"{device.date}; links {link.source}",
        ]


def choose(question: OfDecoder, strategy: Strategy | None = None) -> Choice:
    """Return the choice for a question; with `strategy`, choose only its microbatch.

    Raises:
        PhalanxError: no strategy is legal, or none fits; the message has the nearest one's excess.
    """
    if strategy is None:
        result = search(question)
        return choice_of(result.candidates, result.rejected, question.cluster)
    each_size = price_microbatches(question, strategy)
    fitting = [each for each in each_size if isinstance(each, Candidate)]
    fitting.sort(key=lambda each: each.price.step_s)
    rejected = [each for each in each_size if isinstance(each, Inequality)]
    return choice_of(fitting, rejected, question.cluster)


def choice_of(
    fitting: Sequence[Candidate], rejected: Sequence[Inequality], cluster: Cluster
) -> Choice:
    """Return the first of the candidates as the choice, with the nearest alternatives.

    Raises:
        ConfigError: there is no candidate; the message has the nearest rejected one's excess.
    """
    if not fitting:
        nearest = neighbours(None, rejected)
        raise ConfigError(
            f"auto: nothing fits {cluster.num_devices} x {cluster.device.title}; "
            f"{nearest[0] if nearest else 'no microbatch divides the batch'}"
        )
    best, *slower = fitting
    too_large = neighbours(best, rejected)[:1]
    late = [
        Inequality(
            f"{each.planned.strategy} with microbatch {each.planned.microbatch}",
            "a step",
            each.price.step_s,
            best.price.step_s,
            "ms",
        )
        for each in slower
        if each.price.step_s > best.price.step_s
    ]
    return Choice(best, tuple([*too_large, *late][:NUM_REJECTED]), cluster)
