"""Differences between the search and the rules of recipe.py, with reasons in seconds or bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from phalanx.errors import ConfigError, time_text
from phalanx.planner import explain, recipe
from phalanx.planner.given import price_microbatches
from phalanx.planner.search import RECOMPUTE, Candidate, Inequality, Question
from phalanx.strategy import Recompute, Strategy
from phalanx.strategy.value import text_of


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A rule's strategy compared with the best strategy of the search.

    Attributes:
        kind: "by thumb" or "by fit".
        rule: name of the rule.
        why: why the rule applies to the job.
        strategy: the rule's strategy, with the recomputation that it needs to fit.
        step_time_s: predicted step time, seconds; None if the strategy cannot run.
        why_not: why the strategy cannot run; "" if it can.
        departs: differences of the search's strategy, and the time that each cause saves or costs.
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
    """Return the strategies of both rules for a job, compared with the best strategy."""
    sizes = recipe.sizes_of(
        question.shape, question.cluster, question.seq_len, question.num_sequences
    )
    rules = {"by thumb": recipe.of_thumb(sizes), "by fit": recipe.by_fit(sizes)}
    return [_beside(question, kind, rule, best) for kind, rule in rules.items()]


def _beside(question: Question, kind: str, rule: recipe.Rule, best: Candidate | None) -> Departure:
    answer = at_largest_microbatch(question, rule.strategy)
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


def at_largest_microbatch(
    question: Question, strategy: Strategy
) -> Candidate | Inequality | ConfigError:
    """Return a strategy at the largest microbatch that fits, or why it cannot run.

    A pipeline takes the fastest microbatch instead, because a large microbatch leaves too few for
    its stages. The least recomputation with which a microbatch fits is used.
    """
    answer: Inequality | ConfigError | None = None
    for policy in RECOMPUTE:
        with_policy = dataclasses.replace(strategy, recompute=Recompute(policy))
        try:
            found = price_microbatches(question, with_policy)
        except ConfigError as error:  # the ranks do not divide the batch, or a part of the model
            answer = answer or error
            continue
        fitting = [each for each in found if isinstance(each, Candidate)]
        if fitting and strategy.pp.degree == 1:
            return fitting[-1]
        if fitting:
            return min(fitting, key=lambda each: each.price.step_s)
        answer = next((each for each in found if isinstance(each, Inequality)), answer)
    assert answer is not None, "there are microbatches"
    return answer


def departs(question: Question, rule: Candidate, best: Candidate) -> str:
    """Return text: how the search's strategy differs from the rule's, and the time by cause."""
    other = _difference(rule, best)
    if not other:
        return "the search takes the same strategy"
    before, after = (explain.causes_s(each) for each in (rule, best))
    saved = {cause: before.get(cause, 0.0) - after.get(cause, 0.0) for cause in before | after}
    least = explain.WORTH * best.price.step_s
    parts = [f"the search {other}"]
    for verb, sign in (("saves", 1), ("costs", -1)):
        causes = sorted(saved, key=lambda cause: -sign * saved[cause])
        worth = [each for each in causes if sign * saved[each] > least]
        if worth:
            seconds = [f"{time_text(abs(saved[each]))} of {each}" for each in worth]
            parts.append(f"{verb} {', '.join(seconds)}")
    return "; ".join(parts)


def _difference(rule: Candidate, best: Candidate) -> str:
    """Return text: parts of the best strategy and of the rule's that the two do not share."""
    ours, theirs = (_parts(each) for each in (best, rule))
    taken = ",".join(part for part in ours if part not in theirs)
    left = ",".join(part for part in theirs if part not in ours)
    said = []
    if taken and left:
        said.append(f"takes {taken} in place of {left}")
    elif taken or left:
        said.append(f"adds {taken}" if taken else f"does without {left}")
    sizes = [each.planned.microbatch for each in (best, rule)]
    if sizes[0] != sizes[1]:
        said.append(f"takes microbatch {sizes[0]} in place of {sizes[1]}")
    return " and ".join(said)


def _parts(of: Candidate) -> list[str]:
    """Return the texts of a strategy's axes above degree 1, and of its recomputation."""
    strategy = of.planned.strategy
    parts = [text_of(name, axis) for name, axis in strategy.axes() if axis.degree > 1]
    kind = strategy.recompute.kind
    return [*parts, f"recompute:{kind}"] if kind != "none" else parts
