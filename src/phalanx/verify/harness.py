"""Does this strategy of this model compute what one process computes?

The same code trains the same batches twice, once on the strategy's ranks (gloo, on this host) and
once on one, and every loss, gradient, norm and weight is compared, step by step.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from phalanx.comm.check import CollectiveCheck
from phalanx.comm.ledger import Entry
from phalanx.config import OptimizerConfig
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.mesh import build_mesh
from phalanx.parallel import compose
from phalanx.strategy import Strategy, require_built
from phalanx.train.objective import Objective
from phalanx.verify.compare import TOLERANCE, Difference, Verdict, compare_step
from phalanx.verify.record import (
    Case,
    RankReport,
    StepRecord,
    check_rows,
    run_case,
    take_step,
    write_step,
)

COMPARISON_S = 600.0
"""How long rank 0 may compare the last step, in seconds, while the other ranks have returned."""


def verify(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    strategy: str | Strategy,
    objective: Objective,
    *,
    accumulation: int = 1,
    dtype: str = "float64",
    optimizer: OptimizerConfig | None = None,
    roles: Mapping[str, str] | None = None,
    debug_comm: bool = False,
) -> Verdict:
    """Compare a strategy with one process on your own module and batches.

    Args:
        build: importable function that returns the module with its first weights; it must draw the
            same ones in every process.
        batches: the global batch of each step: a tensor, or a mapping, sequence or dataclass of
            tensors, whose first dimension is the samples.
        strategy: such as "dp2".
        objective: how a microbatch becomes a sum of losses and a number of valid tokens.
        accumulation: microbatches each rank cuts its share into; one process always takes the
            whole.
        dtype: "float64", "float32" or "bfloat16", of weights and arithmetic; floating-point tensors
            of the batches are cast to it.
        optimizer: AdamW's settings; its defaults if None.
        roles: patterns of module names to roles for tp, as {"layers.*.up": "column"}, see
            docs/tensor.md; known for our decoder and transformers' Llama, GPT-2 and BERT.
        debug_comm: compare each collective of all ranks before it runs, see docs/debugging.md.

    Returns:
        The verdict; `verdict.is_equal` and `str(verdict)` say it all.

    Raises:
        ConfigError: a batch has too few rows.
        StrategyError: the strategy is not built, or does not split this module.
        CollectiveMismatch: under `debug_comm`, the ranks' calls differ.
    """
    parsed = strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)
    require_built(parsed)
    if dtype not in TOLERANCE:
        raise ConfigError(f"verify: dtype is '{dtype}'; expected one of {', '.join(TOLERANCE)}")
    if not batches:
        raise ConfigError("verify: no batches; give at least one")
    case = Case(
        build, objective, batches, accumulation, dtype, optimizer or OptimizerConfig(), roles
    )
    return compare_case(case, parsed, debug_comm)[0]


def compare_case(
    case: Case, strategy: Strategy, debug_comm: bool = False
) -> tuple[Verdict, list[Entry]]:
    """Run a case both ways.

    Returns:
        The verdict, and what rank 0 sent in the last step under the strategy.

    Raises:
        ConfigError: a batch has too few rows.
        StrategyError: the model cannot be split so.
    """
    check_rows(case, strategy.data_ranks)
    compose.check(case.build(), strategy, case.roles)
    alone = dataclasses.replace(case, accumulation=1)
    with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as folder:
        run_ranks(run_case, 1, alone, "dp1", functools.partial(write_step, folder))
        reports: list[RankReport] = run_ranks(
            _run_compared if debug_comm else run_case,
            strategy.num_ranks,
            case,
            str(strategy),
            functools.partial(_compare_with, folder),
            uneven_s=COMPARISON_S,
        )
    differences = [row for rows in reports[0].visited for row in rows]
    verdict = Verdict(str(strategy), TOLERANCE[case.dtype], differences, _unequal(reports))
    return verdict, reports[0].entries


def _run_compared(
    case: Case, strategy_text: str, visit: Callable[[int, StepRecord], Any]
) -> RankReport:
    """Run the case on this rank, and compare each collective with those of the other ranks."""
    with CollectiveCheck(build_mesh(Strategy.parse(strategy_text))):
        return run_case(case, strategy_text, visit)


def _compare_with(folder: str, step: int, record: StepRecord) -> list[Difference]:
    """Compare a step with the one process's, whose record is then removed."""
    return compare_step(step, record, take_step(folder, step))


def _unequal(reports: list[RankReport]) -> list[str]:
    """Name the weights whose bits differ between ranks that hold the same part."""
    bits: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for report in reports:
        for part, digest in report.weights.items():
            bits.setdefault(part, set()).add(digest)
    return [name for (name, _), digests in bits.items() if len(digests) > 1]
