"""Where the search departs from the rules of recipe.py, and why: in seconds, or in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.errors import ConfigError, time_text
from phalanx.planner import explain, recipe
from phalanx.planner.given import priced_strategy
from phalanx.planner.search import MICROBATCHES, RECOMPUTE, Candidate, Inequality, Question
from phalanx.strategy import Recompute, Strategy
from phalanx.strategy.value import text_of


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A rule beside the search.

    Attributes:
        kind: by thumb, or by fit.
        rule: its name.
        why: the job stands on it.
        strategy: that the rule chooses, with what it must recompute to fit.
        step_time_s: its price; None where it cannot run.
        why_not: it cannot run.
        departs: what the search has in place of what the rule has, and what that saves.
    """

    kind: str
    rule: str
    why: str
    strategy: str
    microbatch: int | None = None
    step_time_s: float | None = None
    why_not: str = ""
    departs: str = ""


def departures(question: Question, best: Candidate | None) -> list[Departure]:
    """Return both rules of a job, and where the best strategy departs from their choices."""
    sizes = recipe.sizes_of(
        question.shape, question.cluster, question.seq_len, question.num_sequences
    )
    rules = {"by thumb": recipe.of_thumb(sizes), "by fit": recipe.by_fit(sizes)}
    return [_beside(question, kind, rule, best) for kind, rule in rules.items()]


def _beside(question: Question, kind: str, rule: recipe.Rule, best: Candidate | None) -> Departure:
    answer = settled(question, rule.strategy)
    of = Departure(kind=kind, rule=rule.name, why=rule.why, strategy=str(rule.strategy))
    if not isinstance(answer, Candidate):
        takes = "" if best is None else f"the search takes {best.planned.strategy}"
        return dataclasses.replace(of, why_not=str(answer), departs=takes)
    return dataclasses.replace(
        of,
        strategy=str(answer.planned.strategy),
        microbatch=answer.planned.microbatch,
        step_time_s=answer.price.step_s,
        departs="" if best is None else departs(question, answer, best),
    )


def settled(question: Question, strategy: Strategy) -> Candidate | Inequality | ConfigError:
    """Return a strategy at the largest microbatch that fits; or why it cannot run.

    Of a pipeline at the fastest, which leaves stages enough to do. It recomputes as little as lets
    one fit.
    """
    answer: Candidate | Inequality | ConfigError | None = None
    for policy in RECOMPUTE:
        with_policy = dataclasses.replace(strategy, recompute=Recompute(policy))
        for microbatch in reversed(MICROBATCHES) if strategy.pp.degree == 1 else [None]:
            try:
                answer = priced_strategy(question, with_policy, microbatch)
            except ConfigError as error:  # the microbatch, or the ranks, do not divide the batch
                answer = answer or error
                continue
            if isinstance(answer, Candidate):
                return answer
    assert answer is not None, "there are microbatches"
    return answer


def departs(question: Question, rule: Candidate, best: Candidate) -> str:
    """Return what the search takes in place of the rule's, and the seconds that this saves."""
    other = list(_differences(rule, best))
    if not other:
        return "the search takes the same"
    before, after = (explain.causes_s(each) for each in (rule, best))
    saved = {cause: before.get(cause, 0.0) - after.get(cause, 0.0) for cause in before | after}
    least = explain.WORTH * best.price.step_s
    parts = [f"the search takes {', '.join(other)}"]
    for verb, sign in (("saves", 1), ("costs", -1)):
        causes = sorted(saved, key=lambda cause: -sign * saved[cause])
        worth = [each for each in causes if sign * saved[each] > least]
        if worth:
            seconds = [f"{time_text(abs(saved[each]))} of {each}" for each in worth]
            parts.append(f"{verb} {', '.join(seconds)}")
    return "; ".join(parts)


def _differences(rule: Candidate, best: Candidate) -> Iterator[str]:
    pairs = zip(rule.planned.strategy.axes(), best.planned.strategy.axes(), strict=True)
    for (name, one), (_, other) in pairs:
        if (one if one.degree > 1 else 1) != (other if other.degree > 1 else 1):
            yield f"{text_of(name, other)} for {text_of(name, one)}"
    before, after = (each.planned.strategy.recompute.kind for each in (rule, best))
    if before != after:
        yield f"recompute:{after} for {before}"
    if rule.planned.microbatch != best.planned.microbatch:
        yield f"microbatch {best.planned.microbatch} for {rule.planned.microbatch}"
