"""A trainer's module for the planner: counted on the meta device, with shapes of its own data."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from phalanx.account.module import AnyModule
from phalanx.account.planned import PlannedStep
from phalanx.data.rows import count_rows, map_batch
from phalanx.errors import ConfigError, PhalanxError
from phalanx.parallel.skeleton import copied_on_meta
from phalanx.planner.machine import Cluster
from phalanx.planner.search import Question
from phalanx.planner.software import Software
from phalanx.strategy import Strategy

if TYPE_CHECKING:
    from phalanx.script.trainer import Trainer


_BATCHES_READ, _MOST_READ_S = 16, 1.0
"""Number of batches that time a loader, and seconds after which timing ends earlier."""


def module_of(trainer: Trainer, name: str, model: nn.Module | None = None) -> AnyModule:
    """Return a trainer's module for the planner; read a batch and restore torch's generator.

    Args:
        trainer: if `model` is None, its `build` makes the module, on the meta device if possible.
        name: name of the job for messages.
        model: the module before it is split.

    Raises:
        ConfigError: the data are empty, or the module has no parameters.
    """
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(trainer.loader(trainer.data)), None)
        if batch is None:
            raise ConfigError(
                f"{name} has no data; expected at least one batch, whose operations are counted"
            )
        built = _built(trainer) if model is None else copied_on_meta((model,))[0]
    if next(built.parameters(), None) is None:
        raise ConfigError(
            f"{name}: {type(built).__name__} has no parameters, so nothing is trained"
        )
    options = {"roles": trainer.roles, "batch_norm": trainer.batch_norm}
    rows = functools.partial(_rows, batch)
    return AnyModule(name, built, trainer.objective, rows, trainer.optimizer, options)


def loader_rate(trainer: Trainer) -> float | None:
    """Measure the rows per second of a trainer's loader in this process, over a few batches.

    Returns None if the data give no batch, for example because they can be read only once.
    """
    with torch.random.fork_rng(devices=[]):
        rows, begun_s = 0, time.perf_counter()
        ended_s = begun_s
        for number, batch in enumerate(trainer.loader(trainer.data), 1):
            ended_s = time.perf_counter()
            rows += count_rows(batch)
            if number == _BATCHES_READ or ended_s - begun_s > _MOST_READ_S:
                break
    return rows / (ended_s - begun_s) if rows else None


def question_of(
    trainer: Trainer, module: AnyModule, cluster: Cluster, program: Software
) -> Question[AnyModule]:
    """Return the planner's search problem for a trainer: its global batch on `cluster`."""
    return Question(module, cluster, program, trainer.batch_size)


def counted_of(trainer: Trainer, strategy: Strategy, model: nn.Module) -> AnyModule | None:
    """Return a trainer's module to predict its step time; None if it cannot be counted."""
    is_split = strategy.tp.degree * strategy.sample_shards > 1
    if is_split or isinstance(trainer.data, IterableDataset):
        return None
    try:
        return module_of(trainer, type(model).__name__, model)
    except Exception:  # a module that cannot be copied, or data that cannot be read twice
        return None


def planned_of(
    counted: AnyModule, strategy: Strategy, trainer: Trainer
) -> PlannedStep[AnyModule] | None:
    """Return the plan of a step with microbatches of a full batch; None if not countable."""
    rows = trainer.batch_size // (strategy.data_ranks * trainer.accumulation)
    planned = PlannedStep(counted, strategy, rows, trainer.accumulation)
    try:
        counted.recomputes(strategy)
        return planned if rows and counted.links(rows) else None
    except PhalanxError:
        return None


def _built(trainer: Trainer) -> nn.Module:
    try:
        with torch.device("meta"):
            return trainer.build().train()
    except Exception:  # `build` computes with or reads its initial weights
        return copied_on_meta((trainer.build().train(),))[0]


def _rows(batch: Any, num_rows: int) -> Any:
    """Return `num_rows` rows with the shapes and dtypes of `batch`, on the meta device."""

    def of(x: Tensor) -> Tensor:
        return torch.empty((num_rows, *x.shape[1:]), dtype=x.dtype, device="meta")

    return map_batch(batch, of)
