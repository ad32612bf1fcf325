"""`phalanx plan --script FILE.py:JOB`: plan a user's module."""

from __future__ import annotations

import traceback
from typing import Any

from phalanx.account.module import AnyModule
from phalanx.account.planned import PlannedStep
from phalanx.errors import ConfigError, PhalanxError, text_of
from phalanx.planner import explain, hardware
from phalanx.planner.price import price
from phalanx.planner.search import Candidate, Inequality, Question, fits, search_module
from phalanx.planner.software import software
from phalanx.script.counting import loader_rate, module_of, question_of
from phalanx.script.flops import stage_lines
from phalanx.script.trainer import Trainer, trainer_of
from phalanx.strategy import Strategy, refuse_servers, require_built


def plan_script(
    script: str, cluster: str | None, program: str, strategy: str | None
) -> dict[str, Any]:
    """Return the document on a job: its fastest strategies, or the figures of `strategy`.

    Raises:
        PhalanxError: the job, cluster or strategy is illegal, or the module cannot be counted.
    """
    if cluster is None:
        raise ConfigError("--cluster is missing; expected a cluster, such as h100:8, or this")
    on = hardware.cluster(cluster)
    try:
        trainer = trainer_of(script)
        module = module_of(trainer, script)
    except (PhalanxError, MemoryError):
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        raise ConfigError(
            f"{script} raised {type(error).__name__}: {text_of(error)} "
            f"({last.filename}, line {last.lineno})"
        ) from error
    question = question_of(trainer, module, on, software(program))
    if strategy is None:
        found = search_module(question, trainer.accumulation)
        candidates = found.candidates
        best = candidates[0] if candidates else None
        shown = explain.neighbours(best, found.rejected)
    else:
        candidates, shown = _given(question, trainer, strategy)
        best = candidates[0] if candidates else None
    document = explain.answer(question, candidates, shown)
    document["question"]["model"] = script
    document["advice"] += _stages(best) if best else []
    return document | {"loader_rows_per_s": loader_rate(trainer)}


def _given(question: Question[AnyModule], trainer: Trainer, text: str) -> tuple[Any, Any]:
    strategy = Strategy.parse(text)
    require_built(strategy)
    refuse_servers(strategy, "a script")
    unit = strategy.data_ranks * trainer.accumulation
    microbatch, rest = divmod(trainer.batch_size, unit)
    if rest or not microbatch:
        legal = max(1, round(trainer.batch_size / unit)) * unit
        raise ConfigError(
            f"the batch of {trainer.batch_size} rows is not a multiple of {strategy.data_ranks} "
            f"data ranks x accumulation {trainer.accumulation}; the nearest batch is {legal}"
        )
    planned = question.step(strategy, microbatch, trainer.accumulation)
    held = fits(question, planned)
    if isinstance(held, Inequality):
        return [], [held]
    return [Candidate(planned, price(planned, question.cluster, question.software), held)], []


def _stages(best: Candidate) -> list[str]:
    """Return lines on the pipeline stages of the module; empty without a pipeline."""
    planned: PlannedStep[AnyModule] = best.planned
    plan, links = planned.plan, planned.model.links(planned.microbatch)
    return [] if plan.cut is None else stage_lines(plan.strategy, links, plan.cut)
