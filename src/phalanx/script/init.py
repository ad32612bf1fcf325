"""`phalanx.init`: join the job that the script was started in, and return a `Run`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import StrategyError
from phalanx.launch.attach import attach, check_end, report_in_one_message
from phalanx.launch.failure import report
from phalanx.launch.launched import JobReport, launched, require_agent
from phalanx.launch.rank_env import read_rank_env
from phalanx.measure.rank_places import gathered
from phalanx.report.terminal import text_of
from phalanx.script.checks import check_arguments
from phalanx.script.run import Run
from phalanx.script.whole_weights import explain_shard_error
from phalanx.strategy import Strategy, refuse_servers

STRATEGY: Final = "PHALANX_STRATEGY"
"""Environment variable by which `phalanx run --strategy` passes the strategy to the script."""

_NUMBERS = itertools.count()

OVERRIDES: Final[list[tuple[Strategy | None, Callable[[Run], None]]]] = []
"""Set by a proof: the strategy, None for the script's; and a function to call with each run."""


def init(
    strategy: str | Strategy | None = None,
    *,
    accumulation: int = 1,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float | None = None,
    nonfinite: Literal["stop", "skip"] = "stop",
    memory_every: int | None = None,
    shared_memory: bool = True,
    debug_comm: bool = False,
) -> Run:
    """Join the job of `phalanx run`, torchrun or Slurm, or start a job of one process.

    Args:
        strategy: parallelism strategy, such as "dp2,fsdp2". If None, the strategy of
            `phalanx run --strategy`; if that is not given either, dp over all ranks.
        accumulation: calls of `backward` for each optimizer step. The last step of a pass over the
            data may have fewer.
        seed: seed of the dropout masks.
        device: device to compute on; "auto" is "cuda" if there is a GPU.
        timeout_s: longest wait for another rank in one collective, in seconds. If None, the value
            of `phalanx run --timeout-s`, or 600.
        nonfinite: what happens when a loss is not finite: "stop" raises an error before the weights
            change; "skip" leaves the weights as they are in this step.
        memory_every: most steps that a restart by `phalanx launch` loses of a run that `resume`
            names, one more at the end of a pass, by saves in memory between two batches; 0:
            restarts resume from the disk. Unset: as few as take 4 % of the time, and 0 without
            restarts.
        shared_memory: whether CPU ranks of one host communicate by shared memory instead of gloo.
        debug_comm: compare each collective between ranks before it runs, see docs/debugging.md.

    Raises:
        ConfigError: the strategy cannot be parsed, needs servers or another number of ranks, or has
            pp or cp, which need a trainer's loop; or the job is incomplete, or ranks disagree.
    """
    report_in_one_message(explain_shard_error)
    job = launched()
    if job is not None and job.strategy is not None:  # a later generation of `phalanx launch`
        strategy = job.strategy
        os.environ.pop(STRATEGY, None)
    parsed = (OVERRIDES[-1][0] if OVERRIDES else None) or _strategy(strategy)
    known: dict[str, Any] = {"accumulation": accumulation, "seed": seed}
    known |= {"nonfinite": nonfinite, "memory_every": memory_every}
    check_arguments("init", **known, device=device, timeout_s=timeout_s)
    require_agent(memory_every)
    facts = {"strategy": parsed and str(parsed), **known}
    facts |= {"shared_memory": shared_memory, "debug_comm": debug_comm}
    is_new = not dist.is_initialized()  # else `phalanx run` has started this rank
    kind, num_ranks = attach(facts, device=device, timeout_s=timeout_s), dist.get_world_size()
    parsed = parsed or Strategy.parse(f"dp{num_ranks}")
    if parsed.num_ranks != num_ranks == 1:
        raise StrategyError(
            f"init: strategy '{parsed}' needs {parsed.num_ranks} ranks, but this is one process; "
            f"start the script by: phalanx run {Path(sys.argv[0]).name} --nproc {parsed.num_ranks}"
        )
    name = f"run {next(_NUMBERS)}"
    check_end(f"{name} of the script begins")  # checks of earlier runs, which are over
    comm = Ranks(parsed, kind, shares_memory=shared_memory)
    run = Run(comm, parsed, accumulation, seed, name, nonfinite, memory_every)
    if is_new and num_ranks > 1 and comm.is_first:
        report(
            "torchrun and Slurm start no process to compare with; compare on one host by: "
            f"phalanx verify {parsed} --script {sys.argv[0]}"
        )
    if read_rank_env().num_here < num_ranks and (placement := gathered(comm)) is not None:
        report(text_of(placement.table()))
    if comm.is_first and job is not None:
        JobReport(strategy=str(parsed), run=None).write(job.folder)
    if debug_comm:
        CollectiveCheck(comm).__enter__()  # until the process ends
    if OVERRIDES:
        OVERRIDES[-1][1](run)
    return run


def _strategy(given: str | Strategy | None) -> Strategy | None:
    """Return the strategy of the script or of its command line; None if neither has one."""
    asked = os.environ.get(STRATEGY)
    strategy = Strategy.parse(given) if isinstance(given, str) else given
    if not isinstance(strategy, Strategy | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StrategyError(f"init: strategy is {strategy!r}; expected text such as 'dp2,fsdp2'")
    if asked and strategy is not None and str(strategy) != str(Strategy.parse(asked)):
        raise StrategyError(
            f"init: the script sets strategy '{strategy}' and its command line sets '{asked}'; "
            "leave one of them out"
        )
    strategy = Strategy.parse(asked) if asked and strategy is None else strategy
    if strategy is not None:
        refuse_in_own_loop(strategy)
    return strategy


def refuse_in_own_loop(strategy: Strategy) -> None:
    """Refuse a strategy that needs a trainer's loop.

    Raises:
        StrategyError: it needs parameter servers, or has pp or cp, which run the forward
            themselves.
    """
    refuse_servers(strategy, "a loop of one's own")
    for axis, what in (("pp", "a pipeline"), ("cp", "context parallelism")):
        if getattr(strategy, axis).degree > 1:
            raise StrategyError(
                f"strategy '{strategy}' has {axis}: {what} runs the forward itself, but a loop of "
                "one's own calls the model; use dp, fsdp and tp here"
            )
