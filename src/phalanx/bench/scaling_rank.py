"""A rank of `phalanx bench scaling`: steps on random tokens, timed by term and by mesh axis."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from phalanx.bench.timed import TimedArithmetic
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.comm.together import barrier
from phalanx.comm.waits import around_waits, waiting
from phalanx.config import BatchConfig, OptimizerConfig, solve_batch
from phalanx.data.samples import Batch
from phalanx.measure.memory import MemoryLedger
from phalanx.measure.timer import StepTimer, Term
from phalanx.models.initial import fill_initial
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.precision import resolve
from phalanx.train.session import compile_blocks
from phalanx.train.step import TERMS, Step

if TYPE_CHECKING:
    from phalanx.bench.scaling import Case, ScalingConfig

WARMUP_STEPS: Final = 2
"""Untimed steps at the start of each job; they allocate buffers, and the last one is watched."""


@dataclass(frozen=True)
class RankSteps:
    """Timed steps of one rank: wall seconds, seconds by term, exposed waits by mesh axis.

    `terms_s` has a term more than the step ledger, "core": ready to compute, but without a core.
    """

    walls_s: list[float]
    terms_s: list[dict[str, float]]
    exposed_s: list[dict[str, float]]
    sent_bytes: float = 0.0
    peak_bytes: int = 0


def time_strategy(
    case: Case, config: ScalingConfig, *, compile: bool = False, is_watched: bool = True
) -> RankSteps:
    """Run steps on this rank, with compiled blocks if `compile`; return their times.

    With `is_watched`, the last warm-up step counts bytes and memory.
    """
    strategy, shape = Strategy.parse(case.strategy), config.model_shape
    rate = None if config.gbit is None else config.gbit * 1e9 / 8
    comm = Ranks(strategy, config.device, bytes_per_s=rate)
    device, precision = comm.device, resolve(config.precision, config.device)
    plan = plan_decoder(strategy, shape, precision.master, precision.compute, comm.coord("pp"))
    runner = plan.build(comm, functools.partial(fill_initial, shape, 0))
    model = plan.model
    if compile:
        compile_blocks(model)
    optimizer = OptimizerConfig()
    step = Step(
        model,
        build_optimizer(model, optimizer),
        NextToken(0, shape.dropout),
        optimizer,
        comm=comm,
        num_steps=WARMUP_STEPS + config.steps,
        run=runner,
    )
    sizes = solve_batch(
        BatchConfig(global_size=case.num_rows), strategy.data_ranks, strategy.pp.degree
    )
    first = comm.coord("data") * sizes.microbatch * sizes.accumulation
    generator = torch.Generator().manual_seed(first)
    microbatches: list[Batch] = []
    for number in range(sizes.accumulation):
        size, row = (sizes.microbatch, config.seq_len), first + number * sizes.microbatch
        tokens_BT, labels_BT = (
            torch.randint(shape.vocab_size, size, generator=generator) for _ in range(2)
        )
        batch = Batch(
            tokens_BT=tokens_BT,
            labels_BT=labels_BT,
            positions_BT=torch.arange(config.seq_len).expand(size).contiguous(),
            documents_BT=None,
            rows_B=torch.arange(row, row + sizes.microbatch),
        )
        microbatches.append(batch.to(device))
    timer, queued = StepTimer(device), defaultdict[Term, float](float)
    open_terms: list[Term] = ["other"]
    in_queue_s = _queue_clock()
    begin_queue_s = in_queue_s()
    steps = RankSteps([], [], [])

    def count_queue() -> None:
        nonlocal begin_queue_s
        now_s = in_queue_s()
        queued[open_terms[-1]] += now_s - begin_queue_s
        begin_queue_s = now_s

    @contextmanager
    def phase(term: Term, axis: str = "") -> Generator[None]:
        count_queue()
        open_terms.append(term)
        with timer.wait(axis) if axis else timer.phase(term):
            yield
        count_queue()
        open_terms.pop()

    ledger, memory = Ledger(comm), MemoryLedger(model, step.optimizer, device)
    with ExitStack() as watching:
        if case.is_timed:
            watching.enter_context(TimedArithmetic().running())
        watching.enter_context(step.watched(lambda name: phase(TERMS[name])))
        if device.type == "cpu":  # on a GPU the stream waits, not this thread
            watching.enter_context(around_waits(lambda _, axis: phase("communication", axis)))
        for number in range(WARMUP_STEPS + config.steps):
            barrier()
            with ExitStack() as counting:
                if is_watched and number == WARMUP_STEPS - 1:
                    counting.enter_context(ledger)
                    counting.enter_context(memory)
                    counting.enter_context(step.watched(memory.phase))
                count_queue()
                queued.clear()
                timer.begin_step()
                step(microbatches)
                with waiting(axis="other ranks"):  # the slowest rank ends the step of all
                    barrier()
                count_queue()
                times = timer.end_step()
            if number >= WARMUP_STEPS:
                queued.pop(
                    "communication", None
                )  # also with a core, the message would not be there
                terms_s = {term: times.terms_s[term] - queued[term] for term in times.terms_s}
                steps.walls_s.append(times.wall_s)
                steps.terms_s.append({**terms_s, "core": sum(queued.values())})
                steps.exposed_s.append(dict(times.exposed_s))
    if not is_watched:
        return steps
    sent_bytes = sum(entry.sent_bytes for entry in ledger.entries())
    return dataclasses.replace(steps, sent_bytes=sent_bytes, peak_bytes=memory.account().peak_bytes)


def _queue_clock() -> Callable[[], float]:
    """Return a function of this thread: its seconds without a core so far; 0 if not counted."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # ns on a core, ns in the queue
        return lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    except OSError:
        return lambda: 0.0
