"""Choose the strategy and the microbatch of a run, and name the nearest that were rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError, time_text
from phalanx.planner.explain import neighbours
from phalanx.planner.given import answers
from phalanx.planner.machine import Cluster
from phalanx.planner.search import Candidate, Inequality, Question, search
from phalanx.strategy import Strategy

NUM_REJECTED = 2
"""Rejected ones that are named."""


@dataclass(frozen=True)
class Choice:
    """The fastest strategy and microbatch that fit.

    Attributes:
        rejected: the nearest to it, by what they hold or by their time.
    """

    best: Candidate
    rejected: tuple[Inequality, ...]
    cluster: Cluster

    def lines(self) -> list[str]:
        """Return in words what was chosen, on which machine, and what was not."""
        planned, device = self.best.planned, self.cluster.device
        link = self.cluster.levels[0].link
        return [
            f"auto: {planned.strategy} with microbatch {planned.microbatch} x "
            f"{planned.accumulation}, {time_text(self.best.price.step_s)} a step by the plan",
            *(f"  not {each}" for each in self.rejected),
            f"  planned on {self.cluster.num_devices} x {device.title}: {device.source}, "
            f"{device.date}; links {link.source}",
        ]


def choose(question: Question, strategy: Strategy | None = None) -> Choice:
    """Return the choice for a question; of one strategy, its microbatch alone is open.

    Raises:
        PhalanxError: none is legal, or none fits; says how near the nearest is.
    """
    if strategy is None:
        found = search(question)
        return choice_of(found.candidates, found.rejected, question.cluster)
    each_size = answers(question, strategy)
    fitting = [each for each in each_size if isinstance(each, Candidate)]
    fitting.sort(key=lambda each: each.price.step_s)
    rejected = [each for each in each_size if isinstance(each, Inequality)]
    return choice_of(fitting, rejected, question.cluster)


def choice_of(
    fitting: Sequence[Candidate], rejected: Sequence[Inequality], cluster: Cluster
) -> Choice:
    """Return the first of the candidates, and the nearest of the others.

    Raises:
        ConfigError: there is none; says how near the nearest is.
    """
    if not fitting:
        nearest = neighbours(None, rejected)
        raise ConfigError(
            f"auto: nothing fits {cluster.num_devices} x {cluster.device.title}; "
            f"{nearest[0] if nearest else 'no microbatch divides the batch'}"
        )
    best, *slower = fitting
    return Choice(best, tuple(_nearest(best, slower, rejected)), cluster)


def _nearest(
    best: Candidate, slower: Sequence[Candidate], rejected: Sequence[Inequality]
) -> list[Inequality]:
    """Return the nearest that hold too much, and then those that are slower."""
    too_large = neighbours(str(best.planned.strategy), rejected)[:1]
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
    return [*too_large, *late][:NUM_REJECTED]
