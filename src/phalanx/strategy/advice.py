"""Checks of a strategy; each error message names the nearest strategy that can run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
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
    """Return the strategy with which a job of `strategy` continues on at most `most_ranks` ranks.

    Ask with the strategy that the user gave: the result grows back to it as hosts join.

        fsdp4 on 3 ranks             fsdp3        dp2,tp2 on 3 ranks       tp2
        dp2,fsdp2 on 3 ranks         fsdp2        pp2,tp2 on 3 ranks       tp2
        dp4 on 3 ranks, 8 rows       dp2          pp4,cut:... on 3 ranks   pp3

    dp shrinks first, because a rank then holds as much as before: dp2,fsdp2 on 3 ranks becomes
    fsdp2 and not dp3, whose ranks hold the whole model. fsdp shrinks next, and last the axes that
    split the model, by as little as possible and the outermost first. There pp shrinks to any
    degree, the others to divisors of theirs, which divide heads and positions too; a grid, such as
    tp4:2d, can give way to 1d.

    Args:
        strategy: a strategy that passes `require_built`.
        most_ranks: number of ranks that can be started, at least 1.
        global_rows: rows of the global batch, which the data ranks of the result divide; None if
            any number of data ranks fits.
    """
    assert most_ranks >= 1, "a job has a rank"
    if strategy.num_ranks <= most_ranks:
        return strategy
    whole = dict(each for each in reversed([*strategy.axes()]) if each[0] not in ("dp", "fsdp"))

    def worth(split: Sequence[Axis]) -> tuple[int, list[tuple[int, bool]]]:
        num_parts = math.prod(axis.degree for axis in split)
        kinds = [axis.kind for axis in whole.values()]
        kept = [(axis.degree, axis.kind == kind) for axis, kind in zip(split, kinds, strict=True)]
        return num_parts if num_parts <= most_ranks else 0, kept

    splits = itertools.product(*(_smaller(name, axis) for name, axis in whole.items()))
    axes = dict(zip(whole, max(splits, key=worth), strict=True))
    most = most_ranks // math.prod(axis.degree for axis in axes.values())
    rows = (global_rows or 0) // axes["ep"].degree  # every number divides 0
    fsdp = max(n for n in range(1, min(strategy.fsdp.degree, most) + 1) if rows % n == 0)
    replicas = range(1, min(strategy.dp.degree, most // fsdp) + 1)
    dp = max(n for n in replicas if rows % (n * fsdp) == 0)
    option = strategy.dp.option
    if option is not None and strategy.dp.kind == "quorum":
        option = min(dp, option)
    axes["dp"] = Axis(dp, strategy.dp.kind, option)
    axes["fsdp"] = dataclasses.replace(strategy.fsdp, degree=fsdp)
    # An axis of degree 1 has no kind, which would be ignored.
    alone = {name: getattr(Strategy, name) for name, axis in axes.items() if axis.degree == 1}
    if axes["pp"] != strategy.pp:
        strategy = dataclasses.replace(strategy, cut=(), schedule="")
    return dataclasses.replace(strategy, **{**axes, **alone})


def _smaller(name: str, axis: Axis) -> list[Axis]:
    """Return an axis that splits the model with each degree to which it can shrink."""
    kind = KINDS[name][axis.kind]
    kinds = [(axis.kind, axis.option, axis.degree)]
    if kind.grid:  # each dimension of the model is divisible by the side
        side = [*kind.sizes(name, axis.degree, axis.option).values()][-1]
        kinds.append((getattr(Strategy, name).kind, None, side))
    return [
        Axis(degree, each, option)
        for each, option, most in kinds
        for degree in range(1, most + 1)
        if (name == "pp" or most % degree == 0)
        and KINDS[name][each].nearest_degree(degree, option) == degree
    ]
