"""Resolve `auto` in a run's settings by the planner's choice for this machine."""

from __future__ import annotations

import dataclasses
from typing import Final

from phalanx.account.planned import DecoderModel
from phalanx.config import TrainConfig
from phalanx.config.validate import AUTO
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.models.shape import ModelShape
from phalanx.planner.calibration import ASSUMED, this_machine
from phalanx.planner.choice import choose
from phalanx.planner.search import Question
from phalanx.planner.software import SOFTWARE
from phalanx.strategy import POSITIONS, Strategy
from phalanx.train.precision import resolve

DEFAULT_ROWS: Final = 4
"""Default sequences per data rank and microbatch, if the settings do not determine the batch."""


def with_choice(
    config: TrainConfig, given: Strategy, shape: ModelShape, device: str
) -> tuple[TrainConfig, Strategy, list[str]]:
    """Return the settings with the planner's choice, its strategy, and lines that describe it.

    `given` is the named strategy, or any strategy with the number of ranks if it is `auto`.

    Raises:
        PhalanxError: no legal choice fits the memory.
    """
    batch, is_strategy_open = config.batch, config.strategy == AUTO
    microbatch = None if batch.microbatch == AUTO else batch.microbatch
    replicas = given.num_ranks if is_strategy_open else given.data_ranks
    rows = (microbatch or DEFAULT_ROWS) * (batch.accumulation or 1)
    is_of_gpu = config.precision == "auto" and device == "cuda"  # `resolve` would use the GPU
    precision = "bfloat16" if is_of_gpu else resolve(config.precision, device).name
    model = DecoderModel(
        *(shape, config.corpus.seq_len, precision),
        has_documents=config.corpus.document_mask,
        is_muon=config.optimizer.kind == "muon",
    )
    without: tuple[str, ...] = ("pp",) if config.precision == "float16" else ()
    without += (POSITIONS, "tp") if config.compile else ()
    question = Question(
        model=model,
        # Under torchrun each rank chooses by itself, and all must make the same choice.
        cluster=this_machine(given.num_ranks, ASSUMED if is_under_torchrun() else None),
        software=SOFTWARE["compiled" if config.compile else "phalanx"],
        num_sequences=batch.global_size or rows * replicas,
        microbatch=microbatch,
        without=without,
    )
    choice = choose(question, None if is_strategy_open else given)
    planned = choice.best.planned
    settled = dataclasses.replace(
        batch,
        global_size=question.num_sequences,
        microbatch=planned.microbatch,
        accumulation=planned.accumulation,
    )
    config = dataclasses.replace(config, strategy=str(planned.strategy), batch=settled)
    return config, planned.strategy, choice.lines()
