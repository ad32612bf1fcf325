"""A rank of `phalanx bench scaling`: steps on random tokens, timed by term and by mesh axis."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import socket
import subprocess
import sys
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
from phalanx.errors import TrainingError
from phalanx.launch.attach import DEFAULT_TIMEOUT_S
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.launch.torchrun import meet
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
    torch.set_num_threads(config.threads or 1)  # torchrun leaves them to the first child
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


class Jobs:
    """Starts the jobs of a measurement, one after another, also as a rank of torchrun's job.

    There the first ranks run a smaller job by child processes that join each other anew:

        rank 0   child 0 of dp1 | child 0 of dp2 | child 0 of dp4
        rank 1                  | child 1 of dp2 | child 1 of dp4
        rank 2                                   | child 2 of dp4    waits for its first job
    """

    def __init__(self) -> None:
        self._env = read_rank_env() if is_under_torchrun() else None
        self._store = None if self._env is None else meet(self._env, DEFAULT_TIMEOUT_S)
        self._num_jobs = 0

    @property
    def is_first(self) -> bool:
        """Whether this process gets the results."""
        return self._env is None or self._env.rank == 0

    @property
    def most_ranks(self) -> int | None:
        """Ranks of torchrun's job; None without it."""
        return None if self._env is None else self._env.num_ranks

    def run(self, case: Case, config: ScalingConfig) -> list[RankSteps]:
        """Run a case; return the steps of each rank on the first rank, and nothing elsewhere.

        Raises:
            TrainingError: a child of this rank failed; it has reported why.
        """
        num_ranks = Strategy.parse(case.strategy).num_ranks
        words = time_strategy, num_ranks, case, config
        if self._env is None or self._store is None:
            return run_ranks(*words, device=config.device, threads=config.threads)
        env, key = self._env, f"job {self._num_jobs}"
        self._num_jobs += 1
        if env.rank >= num_ranks:
            return []
        if env.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                self._store.set(key, str(free.getsockname()[1]))
        first = env.rank - env.local_rank
        changed = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(min(env.num_here, num_ranks - first)),
            "MASTER_PORT": self._store.get(key).decode(),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import run_child; run_child()"],
            input=pickle.dumps(words),
            stdout=subprocess.PIPE,
            env={**os.environ, **changed},
            check=False,
        )
        if done.returncode:
            raise TrainingError(f"{case.strategy}: its rank {env.rank} ended with an error")
        return pickle.loads(done.stdout) if env.rank == 0 else []


def run_child() -> None:
    """Run the job whose pickled arguments stand in the standard input; print its results, pickled.

    The parent is the same program of the same user, so its pickles are trusted.
    """
    function, num_ranks, case, config = pickle.load(sys.stdin.buffer)
    results = run_ranks(
        function, num_ranks, case, config, device=config.device, threads=config.threads
    )
    if read_rank_env().rank == 0:
        sys.stdout.buffer.write(pickle.dumps(results))
        sys.stdout.buffer.flush()


def _queue_clock() -> Callable[[], float]:
    """Return a function of this thread: its seconds without a core so far; 0 if not counted."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # ns on a core, ns in the queue
        return lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    except OSError:
        return lambda: 0.0
