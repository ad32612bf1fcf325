"""Checks of a strategy; each error message names the nearest strategy that can run."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

from phalanx.errors import StrategyError
from phalanx.strategy.kinds import AXES, KINDS, built
from phalanx.strategy.value import Axis, Strategy, text_of


def require_built(strategy: Strategy) -> None:
    """Check that every part of a strategy, and their combination, is implemented.

    Raises:
        StrategyError: the message names the part, and a strategy or the kinds that can run.
    """
    missing = [
        text_of(*each) for each in strategy.named() if KINDS[each[0]][each[1].kind].about is None
    ]
    if missing:
        raise StrategyError(
            f"strategy '{strategy}': {', '.join(missing)} is not built yet; built: "
            f"{', '.join(built())}"
        )
    for name, part in strategy.named():
        if isinstance(part, Axis) and part.degree == 1:
            wider = dataclasses.replace(part, degree=2)
            raise StrategyError(
                f"strategy '{strategy}': {text_of(name, part)} splits nothing, so its kind would "
                f"be ignored; leave it out, or write {text_of(name, wider)}"
            )
    dp = strategy.dp
    if strategy.is_served and find_spec("zmq") is None:
        raise StrategyError(
            f"strategy '{strategy}': dp:{dp.kind} needs pyzmq, which is not installed: "
            "pip install 'phalanx-train[server]'"
        )
    if strategy.is_served and strategy.of_worker.num_ranks > 1:
        alone = Strategy(dp=dp, recompute=strategy.recompute)
        raise StrategyError(
            f"strategy '{strategy}': a worker of dp:{dp.kind} is one process, which other axes "
            f"cannot split; write '{alone}'"
        )
    if dp.kind == "quorum" and (dp.option or 0) > dp.degree:
        raise StrategyError(
            f"strategy '{strategy}': {dp.degree} workers never reach a quorum of {dp.option}; "
            f"the most is dp{dp.degree}:quorum/{dp.degree}"
        )
    if strategy.fsdp.degree > 1 and dp.degree > 1 and dp.kind != "bucketed":
        plain = dataclasses.replace(strategy, dp=Axis(dp.degree, "bucketed"))
        raise StrategyError(
            f"strategy '{strategy}': with fsdp, dp sums each shard once fsdp has reduced it, and "
            f"dp:{dp.kind} would be ignored; write '{plain}'"
        )


def refuse_servers(strategy: Strategy, where: str) -> None:
    """Refuse a strategy with parameter servers in `where`, which does not start servers.

    Raises:
        StrategyError: `strategy` needs servers; the message names the nearest one without.
    """
    if strategy.is_served:
        dp = strategy.dp
        plain = dataclasses.replace(strategy, dp=Axis(dp.degree, "bucketed"))
        raise StrategyError(
            f"strategy '{strategy}': {where} starts no servers for dp:{dp.kind}; `phalanx train` "
            f"on text does. The nearest is '{plain}'"
        )


def refuse_first_come(strategy: Strategy) -> None:
    """Refuse a strategy whose results depend on the arrival order of the workers' pushes.

    Raises:
        StrategyError: it is not deterministic; the message names the nearest one that is.
    """
    dp = strategy.dp
    if strategy.is_served and dp.kind != "ps" and (dp.kind, dp.option) != ("ssp", 0):
        raise StrategyError(
            f"strategy '{strategy}': the result of dp:{dp.kind} depends on which worker pushes "
            f"first, so no run on one process equals it; the nearest is dp{dp.degree}:ps"
        )


def check_ranks(strategy: Strategy, num_ranks: int) -> None:
    """Check that a strategy needs exactly `num_ranks` ranks.

    Raises:
        StrategyError: it does not; the message has both numbers, and a strategy that fits.
    """
    if strategy.num_ranks == num_ranks:
        return
    raise StrategyError(
        f"strategy '{strategy}' needs {strategy.num_ranks} ranks, but there are {num_ranks}; "
        f"'{_fitting(strategy, num_ranks)}' would use them all, or start {strategy.num_ranks}"
    )


def _fitting(strategy: Strategy, num_ranks: int) -> Strategy:
    """Return a strategy for `num_ranks` ranks that changes one axis of `strategy`, or else dp."""
    if num_ranks == 1:
        return Strategy(recompute=strategy.recompute)
    # pp2,tp4 for 12 ranks: dp would be 12 / 8, which is no degree, and tp is 12 / 2: pp2,tp6.
    for name in (*AXES[1:], AXES[0]):  # pp, the outermost, last
        axis: Axis = getattr(strategy, name)
        others = strategy.num_ranks // axis.degree
        if num_ranks % others or (axis.degree == 1 and name != "dp"):
            continue
        try:
            return strategy.with_degree(name, num_ranks // others)
        except StrategyError:  # a degree of tp that does not form the grid of its kind
            continue
    return Strategy(dp=Axis(num_ranks, strategy.dp.kind, strategy.dp.option))


def shrunk(strategy: Strategy, most_ranks: int, global_rows: int | None) -> Strategy:
    """Return the strategy with fewer data ranks, so that it needs at most `most_ranks`.

    Raises:
        StrategyError: the other axes alone need more ranks.
    """
    for num_data in range(strategy.data_ranks, 0, -1):
        for fsdp in range(min(strategy.fsdp.degree, num_data), 0, -1):
            if num_data % fsdp or (global_rows or num_data) % num_data:
                continue
            smaller = strategy.with_degree("fsdp", fsdp).with_degree("dp", num_data // fsdp)
            if smaller.num_ranks <= most_ranks:
                return smaller
    raise StrategyError(f"strategy '{strategy}' does not fit {most_ranks} ranks")
