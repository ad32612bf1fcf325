"""Speed-up of more ranks over one rank: the same global batch under alternating strategies.

Each round runs every strategy once, one after the other, each as a separate job, so that other load
on the machine affects all strategies. The speed-up of a round is the step time of one rank / the
step time of N ranks in the same round. N ranks cannot be more than N times as fast: if the median
speed-up is above N, other work disturbed the measurement, and no speed-up is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from phalanx.account.fit import check_fit, check_memory_for
from phalanx.account.planned import decoder_step
from phalanx.bench.verb import BenchResult, DecoderConfig, PrintLine
from phalanx.comm.comm import Ranks
from phalanx.comm.together import barrier
from phalanx.config import BatchConfig, OptimizerConfig, solve_batch
from phalanx.config.fields import Positional, Range
from phalanx.config.schema import MOST_ROWS
from phalanx.data.samples import Batch
from phalanx.errors import ConfigError
from phalanx.launch.local import check_gpus, num_cores, run_ranks
from phalanx.models.initial import fill_initial
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.report.output import values_of
from phalanx.report.tabular import Cell, Number, Table
from phalanx.report.units import percent
from phalanx.strategy import Strategy, require_built
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.precision import resolve
from phalanx.train.session import compile_blocks
from phalanx.train.step import Step

WARMUP_STEPS = 2
"""Untimed steps at the start of each job, which allocate buffers."""

ONE_RANK = "dp1"


@dataclass(frozen=True)
class ScalingPoint:
    """Median step times of one strategy and of one rank, in seconds, one of each per round."""

    strategy: str
    num_ranks: int
    times_s: tuple[float, ...]
    one_rank_s: tuple[float, ...]

    @property
    def batches_per_s(self) -> float:
        """Global batches per second in the median round."""
        return 1 / statistics.median(self.times_s)

    @property
    def speed_ups(self) -> list[float]:
        """Time of one rank / time of N ranks, for each round."""
        return [one / many for one, many in zip(self.one_rank_s, self.times_s, strict=True)]

    @property
    def speed_up(self) -> float | None:
        """Median over the rounds; None if it is above N, because then the measurement is wrong."""
        median = statistics.median(self.speed_ups)
        return median if median <= self.num_ranks else None

    @property
    def efficiency(self) -> float | None:
        """Speed-up / N, in [0, 1]."""
        return None if self.speed_up is None else self.speed_up / self.num_ranks


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(DecoderConfig):
    """Measure the speed-up of strategies over one rank: the same global batch, in turns."""

    strategies: Annotated[tuple[str, ...], Positional("[STRATEGY ...]")] = (
        "dp2", "dp4", "fsdp2", "fsdp4", "tp2", "tp4",
    )  # fmt: skip
    """Strategies to measure beside one rank."""
    global_size: Annotated[int, Range(1, MOST_ROWS, "[]")] = 8
    """Sequences in one step, whatever the number of ranks is."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; a rank is a GPU, or `threads` threads of the CPU, 1 if unset."""
    steps: Annotated[int, Range(1)] = 5
    """Steps to time in each round, after two that warm up."""
    rounds: Annotated[int, Range(1)] = 3
    """Rounds; each runs every strategy once."""

    @property
    def model_shape(self) -> ModelShape:
        """Shape of the decoder; its tokens are random."""
        return with_sizes(shape_of(self.model), self.shape)


def run(config: ScalingConfig, say: PrintLine) -> BenchResult:
    """Measure the strategies, and return the table.

    Raises:
        ConfigError: a strategy, the batch or the sequence length does not fit.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dataclasses.replace(config, device=device, threads=config.threads or 1)
    longest = config.model_shape.max_seq_len
    if config.seq_len > longest:
        raise ConfigError(
            f"seq_len is {config.seq_len}, but the model's positions end at {longest}; the "
            f"nearest is {longest}"
        )
    points = measure_scaling(config, say)
    num_tokens = config.global_size * config.seq_len
    rows = [
        values_of(point) | {"tokens_per_s": num_tokens * point.batches_per_s} for point in points
    ]
    kept = ("model", "global_size", "seq_len", "precision", "device", "threads", "steps", "rounds")
    settings = {name: getattr(config, name) for name in kept}
    return BenchResult(
        name=f"scaling-{device}",
        shown=[_table(points, num_tokens), *_remarks(points, config)],
        values={
            **settings,
            "compile": False,
            "shape": values_of(config.model_shape),
            "points": rows,
        },
    )


def _table(points: Sequence[ScalingPoint], num_tokens: int) -> Table:
    heads = (
        *("strategy", Number("ranks", "d"), Number("ms a step", ".1f", 1e-3)),
        *(Number("tokens/s", ",.0f"), Number("batches/s", ".3g"), Number("speed-up", ".2f")),
        *("min - max", Number("efficiency", percent)),
    )
    rows: list[Sequence[Cell]] = []
    for point in points:
        rate = point.batches_per_s
        sped: Sequence[Cell] = ("-", "-", "-")
        if point.speed_up is not None:
            ends = f"{min(point.speed_ups):.2f} - {max(point.speed_ups):.2f}"
            sped = (point.speed_up, ends, point.efficiency)
        rows.append((point.strategy, point.num_ranks, 1 / rate, num_tokens * rate, rate, *sped))
    return Table("", heads, rows, numbers=["min - max"])


def _remarks(points: Sequence[ScalingPoint], config: ScalingConfig) -> list[str]:
    lines = [
        f"the median of {config.rounds} rounds, global batch {config.global_size} x "
        f"{config.seq_len} tokens; speed-ups compare a round with one rank in the same round"
    ]
    if config.device == "cpu":
        threads = config.threads or 1
        ranks = num_cores() // threads
        lines.append(
            f"each rank uses {threads} of {num_cores()} cores: more than {max(1, ranks)} ranks "
            "share cores"
        )
    doubted = [point.strategy for point in points if point.speed_up is None]
    if doubted:
        lines.append(
            f"no speed-up of {', '.join(doubted)}: it came out above the number of ranks, so other "
            "work disturbed this machine; measure again when it is idle"
        )
    return lines


def measure_scaling(config: ScalingConfig, say: PrintLine) -> list[ScalingPoint]:
    """Time one rank and every strategy in each round."""
    parsed = [Strategy.parse(text) for text in (ONE_RANK, *config.strategies)]
    texts = list(dict.fromkeys(map(str, parsed)))
    for strategy in parsed:
        # Each error that a rank would raise is raised before any process starts.
        require_built(strategy)
        check_gpus(strategy.num_ranks, config.device, str(strategy))
        batch = solve_batch(
            BatchConfig(global_size=config.global_size), strategy.data_ranks, strategy.pp.degree
        )
        load = decoder_step(
            *(config.model_shape, strategy, config.seq_len),
            *(batch.microbatch, batch.accumulation, config.precision),
        )
        device = "cuda" if config.device == "cuda" else "cpu"
        check_fit(load, config.model, strategy.num_ranks, device=device, has_activations=False)
        num_parts = plan_decoder(strategy, config.model_shape).row_shards
        if batch.microbatch % num_parts:
            legal = -(-batch.microbatch // num_parts) * num_parts * strategy.data_ranks
            raise ConfigError(
                f"global_size is {config.global_size}, which gives each rank of {strategy} "
                f"microbatches of {batch.microbatch} rows, but {strategy} splits rows into "
                f"{num_parts}; the nearest is {legal}"
            )
    if config.device == "cpu":
        check_memory_for(max(strategy.num_ranks for strategy in parsed))
    times: dict[str, list[float]] = {text: [] for text in texts}
    for number in range(config.rounds):
        say(f"round {number + 1} of {config.rounds}: {', '.join(texts)} ...")
        # Every round runs all strategies, so that a slow minute of the machine hits each of them.
        for text in texts:
            seconds = run_ranks(
                time_strategy,
                Strategy.parse(text).num_ranks,
                text,
                config,
                device=config.device,
                threads=config.threads,
            )
            times[text].append(max(seconds))
    one_rank_s = tuple(times[str(parsed[0])])
    return [
        ScalingPoint(text, Strategy.parse(text).num_ranks, tuple(times[text]), one_rank_s)
        for text in texts
    ]


def time_strategy(text: str, config: ScalingConfig, *, compile: bool = False) -> float:
    """Run steps on this rank, with compiled blocks if `compile`; return the median seconds."""
    strategy, shape = Strategy.parse(text), config.model_shape
    comm = Ranks(strategy, config.device)
    device, precision = comm.device, resolve(config.precision, config.device)
    plan = plan_decoder(strategy, shape, precision.master, precision.compute)
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
    num_rows = config.global_size // strategy.data_ranks
    size, first = (num_rows, config.seq_len), comm.coord("data") * num_rows
    generator = torch.Generator().manual_seed(first)
    tokens_BT, labels_BT = (
        torch.randint(shape.vocab_size, size, generator=generator) for _ in range(2)
    )
    batch = Batch(
        tokens_BT=tokens_BT,
        labels_BT=labels_BT,
        positions_BT=torch.arange(config.seq_len).expand(size).contiguous(),
        documents_BT=None,
        rows_B=torch.arange(first, first + num_rows),
    ).to(device)
    times_s: list[float] = []
    for _ in range(WARMUP_STEPS + config.steps):
        barrier()
        begin_s = time.perf_counter()
        step([batch])
        barrier()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[WARMUP_STEPS:])
