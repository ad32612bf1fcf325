"""The strategy `auto` of a trainer: the planner's choice for its module on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.checkpoint.files import find_whole
from phalanx.config.schema import JobConfig
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.object_store import path_of
from phalanx.planner.calibration import ASSUMED, this_machine
from phalanx.planner.choice import choice_of
from phalanx.planner.search import search_module
from phalanx.planner.software import DEFAULT
from phalanx.script.counting import module_of, question_of
from phalanx.strategy import Strategy
from phalanx.train.job.request import choose, choose_strategy

if TYPE_CHECKING:
    from phalanx.script.trainer import Trainer


def chosen(trainer: Trainer, name: str, config: JobConfig) -> tuple[Strategy, list[str]]:
    """Return the fastest strategy that fits in memory on all ranks, and lines that explain it.

    A resumed run keeps its strategy unless another number of processes is requested.

    Args:
        trainer: trainer whose module is counted.
        name: name of the job for messages.
        config: strategy `auto`, number of processes, device, and the run to resume.

    Raises:
        PhalanxError: the module cannot be counted, or no legal strategy fits.
    """
    given, _ = choose_strategy(config)
    if config.resume is not None:
        before = find_whole(path_of(config.resume), compares=False).about.strategy
        is_open = config.nproc is None and not is_under_torchrun()
        if is_open or Strategy.parse(before).num_ranks == given.num_ranks:
            strategy, _ = choose(before, config.nproc, config.device)
            return strategy, [f"auto: {before}, as the run before"]
    # Under torchrun each rank makes the choice itself, and all must make the same one, so the
    # calibration is the assumed one instead of a measurement.
    cluster = this_machine(given.num_ranks, ASSUMED if is_under_torchrun() else None)
    module = module_of(trainer, name)
    question = question_of(trainer, module, cluster, DEFAULT)
    found = search_module(question, trainer.accumulation)
    choice = choice_of(found.candidates, found.rejected, cluster)
    return choice.best.planned.strategy, choice.lines()
