"""An engine on the ranks of tp: the first rank schedules, samples and responds; all ranks compute.

Before each step the first rank broadcasts the step as plain numbers, or a checkpoint to load. Every
rank stores its heads of the key-value cache, with the same block numbers on all ranks, and its
shards of the weights in the layout of training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from phalanx.checkpoint.manifest import NUM_TRIES
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
from phalanx.infer.runner import WEIGHTS_KEPT, ModelRunner
from phalanx.infer.served import Served, fill_from, open_served
from phalanx.infer.texts import TextEngine
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.parallel.plan import plan_decoder
from phalanx.parallel.tensor.apply import layout_of
from phalanx.strategy import Strategy

KINDS: Final = ("1d", "megatron")
"""Kinds of tp layouts in which each rank has all tokens of its heads."""

IDLE_S: Final = 10.0**6
"""Timeout of collectives, seconds: the other ranks wait in one until a request arrives."""

Work = Callable[[Served, TextEngine], Any]


def with_engine(folder: Path, config: EngineConfig, work: Work) -> Any:
    """Call `work` with the engine of a model, in this process or on the first of several ranks.

    A signal ends several ranks at once, unless `work` calls `PULSE.heed`.

    Args:
        folder: see `open_served`.
        config: settings of the engine; its strategy may split by tp only.
        work: function that can be imported by name, because it may run in another process.

    Returns:
        The result of `work`.

    Raises:
        StrategyError: the strategy has an axis or a layout that is not supported.
        ConfigError: this process is a rank of a job with another number of ranks.
        PhalanxError: the folder or the settings are invalid, or `work` failed.
    """
    strategy = strategy_of(config)
    served = open_served(folder)
    if strategy.num_ranks == 1 and not (is_under_torchrun() and read_rank_env().num_ranks > 1):
        return work(served, engine_of(served, config))
    if config.weights == "int8":
        raise ConfigError(
            f"weights is int8, which needs a single process, but strategy is {strategy}; the "
            "nearest is weights full"
        )
    plan_decoder(strategy, served.weights.shape)  # raises before any process starts
    device = torch_device(config.device).type
    first, *_ = run_ranks(
        *(_run, strategy.num_ranks, folder, config, work),
        device=device,
        threads=config.threads,
        timeout_s=IDLE_S,
    )
    return first


def strategy_of(config: EngineConfig) -> Strategy:
    """Parse the strategy of an engine, and check that it is supported.

    Raises:
        StrategyError: it has an axis other than tp, or a layout that splits rows or positions.
    """
    strategy = Strategy.parse(config.strategy)
    other = [name for name, axis in strategy.axes() if axis.degree > 1 and name != "tp"]
    if other or (strategy.tp.degree > 1 and strategy.tp.kind not in KINDS):
        degree = max(strategy.tp.degree, 2)
        raise StrategyError(
            f"strategy is {strategy}; generation splits a model only by tp, in the layouts "
            f"{' and '.join(KINDS)}; the nearest are tp{degree} and tp{degree}:megatron. A "
            "checkpoint can be read whichever strategy wrote it"
        )
    return strategy


def _run(folder: Path, config: EngineConfig, work: Work) -> Any:
    """Build the model and cache of this rank; the first rank calls `work`, the others follow it."""
    strategy, device = strategy_of(config), torch_device(config.device)
    served = _open_together(folder)
    dtype = torch_dtype(config.precision, device)
    comm = Ranks(strategy, device.type)
    plan = plan_decoder(strategy, served.weights.shape, dtype, dtype)
    plan.build(comm, fill_from(served.weights))
    served.weights.close()
    model, degree = plan.model.eval(), strategy.tp.degree
    num_blocks = min(gather_objects(num_blocks_of(config, model, degree)))  # free memory differs
    pool = pool_of(config, num_blocks)
    runner = ModelRunner(model, cache_of(config, model, pool, degree), layout_of(strategy, comm))
    if not comm.is_first:
        return _follow(runner)
    leading = _BroadcastingRunner(runner)
    try:
        return work(served, assemble(served, config, leading, pool))
    finally:
        leading.end()


def _open_together(folder: Path) -> Served:
    """Open the same checkpoint on each rank; a run may save another while they look for the latest.

    Raises:
        CheckpointError: the run saved during each of NUM_TRIES tries.
    """
    found: set[str] = set()
    for _ in range(NUM_TRIES):
        served = open_served(folder)
        found = {str(each) for each in gather_objects(served.weights.folder)}
        if len(found) == 1:
            return served
    raise CheckpointError(
        f"the ranks found different checkpoints, {', '.join(sorted(found))}, because the run saves "
        "too often; name one that the run keeps"
    )


def _follow(runner: ModelRunner) -> None:
    """Run the steps and loads that the first rank broadcasts, until it broadcasts None."""
    PULSE.heed()  # by that None: the first rank decides on a signal
    while True:
        with PULSE.waiting("waiting for requests"):  # an idle server is not stalled
            order = broadcast_object(None)
        if order is None:
            return
        if isinstance(order, Path):
            with suppress(CheckpointError):  # the first rank raises it too
                _load(runner, order)
        else:
            runner(order)


def _load(runner: ModelRunner, folder: Path) -> None:
    """Load a checkpoint on all ranks; if one rank fails, all keep their weights."""
    runner.put(all_or_none(lambda: runner.read(folder), WEIGHTS_KEPT))


class _BroadcastingRunner:
    """Logits of the first rank: broadcasts each step or load, and then runs it here too.

    The engine's thread calls it, and `end` is called by the thread that ran `work`, which may have
    ended before the engine. The lock keeps their broadcasts apart.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, step: FlatStep) -> Tensor:
        with self._lock:
            broadcast_object(step)
            try:
                return self._runner(step)
            except BaseException as error:
                self._failure = error
                raise

    def load(self, folder: Path) -> None:
        with self._lock:
            broadcast_object(folder)
            _load(self._runner, folder)

    def end(self) -> None:
        """Stop the other ranks, after the current step or load.

        If a step has failed here, they are blocked in its collectives. Then raise the error of that
        step, so that the launcher terminates them.
        """
        self._lock.acquire()  # and never released: no rank would follow a further step
        if self._failure is not None:
            raise self._failure
        broadcast_object(None)
