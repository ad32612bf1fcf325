"""An engine on the ranks of tp: the first schedules, samples and answers, all of them compute.

Before each step the first rank broadcasts the step as plain numbers, or the checkpoint to load in
place of a step. Every rank holds its heads of the cache, in blocks of the same numbers, and its
shards of the weights in the layout of training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from torch import Tensor

from phalanx.comm.comm import Ranks
from phalanx.comm.together import all_or_none, broadcast_object, gather_objects
from phalanx.errors import CheckpointError, ConfigError, StrategyError
from phalanx.infer.assembly import (
    assemble,
    cache_of,
    engine_of,
    num_blocks_of,
    pool_of,
    torch_device,
    torch_dtype,
)
from phalanx.infer.options import EngineConfig
from phalanx.infer.paged import FlatStep
from phalanx.infer.runner import AS_BEFORE, ModelRunner
from phalanx.infer.served import Served, fill_from, open_served
from phalanx.infer.texts import TextEngine
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import plan_decoder
from phalanx.parallel.tensor.apply import layout_of
from phalanx.strategy import Strategy

KINDS: Final = ("1d", "megatron")
"""Layouts whose ranks hold all tokens of their heads."""

IDLE_S: Final = 10.0**6
"""How long the other ranks wait for the first: until a request comes."""

Work = Callable[[Served, TextEngine], object]


def with_engine(folder: Path, config: EngineConfig, work: Work) -> None:
    """Do work with the engine of a model, in this process or on the first of several ranks.

    Args:
        folder: see `open_served`.
        config: of the engine; of its strategy only tp may have a degree.
        work: importable by name, since it may run in another process.

    Raises:
        StrategyError: the strategy has another axis, or another layout.
        PhalanxError: the folder, the settings or the work are wrong.
    """
    strategy = strategy_of(config)
    served = open_served(folder)
    if strategy.num_ranks == 1:
        work(served, engine_of(served, config))
        return
    if config.weights == "int8":
        raise ConfigError(
            f"weights is int8, which is built for one process, and strategy is {strategy}; the "
            "nearest is weights full"
        )
    plan_decoder(strategy, served.weights.shape)  # refuses before any process starts
    device = torch_device(config.device).type
    run_ranks(
        *(_run, strategy.num_ranks, folder, config, work),
        device=device,
        threads=config.threads,
        timeout_s=IDLE_S,
    )


def strategy_of(config: EngineConfig) -> Strategy:
    """Return the strategy of an engine.

    Raises:
        StrategyError: it has another axis than tp, or a layout that splits rows or positions.
    """
    strategy = Strategy.parse(config.strategy)
    other = [name for name, axis in strategy.axes() if axis.degree > 1 and name != "tp"]
    if other or (strategy.tp.degree > 1 and strategy.tp.kind not in KINDS):
        degree = max(strategy.tp.degree, 2)
        raise StrategyError(
            f"strategy is {strategy}; generation splits a model by tp alone, in the layouts "
            f"{' and '.join(KINDS)}; the nearest are tp{degree} and tp{degree}:megatron. A "
            "checkpoint that any strategy has written can be read"
        )
    return strategy


def _run(folder: Path, config: EngineConfig, work: Work) -> None:
    """Build this rank's part of the engine, and work, or compute for the rank that does."""
    strategy, device = strategy_of(config), torch_device(config.device)
    served = open_served(folder)
    dtype = torch_dtype(config.precision, device)
    comm = Ranks(strategy, device.type)
    plan = plan_decoder(strategy, served.weights.shape, dtype, dtype)
    plan.build(comm, fill_from(served.weights))
    model, degree = plan.model.eval(), strategy.tp.degree
    num_blocks = min(gather_objects(num_blocks_of(config, model, degree)))  # free memory differs
    pool = pool_of(config, num_blocks)
    runner = ModelRunner(model, cache_of(config, model, pool, degree), layout_of(strategy, comm))
    if not comm.is_first:
        _follow(runner)
        return
    leading = _Leading(runner)
    try:
        work(served, assemble(served, config, leading, pool))
    finally:
        leading.end()


def _follow(runner: ModelRunner) -> None:
    """Do what the first rank orders, until it ends."""
    while (order := broadcast_object(None)) is not None:
        if isinstance(order, Path):
            with suppress(CheckpointError):  # the first rank raises it too
                _load(runner, order)
        else:
            runner(order)


def _load(runner: ModelRunner, folder: Path) -> None:
    """Load a checkpoint on all ranks, or on none."""
    runner.put(all_or_none(lambda: runner.read(folder), AS_BEFORE))


class _Leading:
    """Lets the other ranks do what the first does."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._failure: BaseException | None = None

    def __call__(self, step: FlatStep) -> Tensor:
        broadcast_object(step)
        try:
            return self._runner(step)
        except BaseException as error:
            self._failure = error
            raise

    def load(self, folder: Path) -> None:
        broadcast_object(folder)
        _load(self._runner, folder)

    def end(self) -> None:
        """Let the other ranks end.

        Amid a step that has failed here they wait in its collectives: the failure is raised, and
        the launcher ends them.
        """
        if self._failure is not None:
            raise self._failure
        broadcast_object(None)
