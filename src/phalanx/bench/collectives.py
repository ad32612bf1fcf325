"""Benchmark of collectives: latency of a hop and bandwidth of a rank, fitted to measured times.

Each collective is timed at several sizes, and reported as in nccl-tests: algbw is size / time, and
busbw is the least rate that a link must carry under any algorithm (nccl-tests, doc/PERFORMANCE.md).
The model time = hops x latency + bytes / bandwidth is fitted to the times, with the hops and bytes
of a ring. Ranks on CPUs of one host are measured through shared memory and over gloo. Under
torchrun on several hosts, the ranks of each host are measured first. Then ranks with the same
number on each host form a group, and all groups run at the same time, so that the ranks of a host
share its network as in training.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import torch

from phalanx.account.fit import check_memory_for
from phalanx.bench.in_step import median_s, time_in_step
from phalanx.bench.picture import draw_fits
from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig
from phalanx.comm.comm import Ranks
from phalanx.comm.shared_memory import SharedMemory
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.launch.local import num_cores, run_ranks
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.planner import calibration, calibration_file
from phalanx.planner.kept_rates import OPS, TimedCollective, fit
from phalanx.planner.machine import Level, Link, OpCost, Unit, ring
from phalanx.report.output import values_of
from phalanx.report.tabular import Number, Table
from phalanx.report.units import KIB

SMALLEST_BYTES: Final = 4 << 10
GROWTH: Final = 4
"""Ratio of each tensor size to the previous one."""

LEVEL_OF_AXIS: Final[dict[str, Unit]] = {"tp": "server", "dp": "cluster"}
"""Axis -> level of its link: `tp` joins the ranks of a host, `dp` one rank of each host."""

LEVEL_WORDS: Final[dict[Unit, str]] = {"server": "a host's ranks", "cluster": "hosts"}
"""Level -> the words of a table for the parts that its link joins."""

ENGINES: Final = {"shared memory": True, "gloo": False}
"""Engine of collectives on CPUs -> whether it uses shared memory."""

TRAINING_ENGINE: Final = "shared memory"
"""Engine that training uses by default."""


@dataclass(frozen=True, kw_only=True)
class CommConfig(ResultConfig):
    """Measure collectives of several sizes between ranks; fit latency and bandwidth to each."""

    ranks: Annotated[int | None, Range(2)] = None
    """Ranks to start on this host; all GPUs, or as many as cores, if unset. Under torchrun those
    that it has started."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors are; auto: the GPUs where there are two, else the CPU."""
    max_mib: Annotated[int, Range(1)] = 16
    """Largest tensor, in MiB."""
    repeats: Annotated[int, Range(1)] = 5
    """Timed repetitions after one warm-up; the median is reported."""
    write: str | None = None
    """Calibration to write for the planner: "this", which calibrates the cluster named "this", or a
    FILE.json, which can be named as a cluster."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The median time of one collective at one size."""

    axis: str
    op: str
    num_ranks: int
    num_bytes: int
    time_s: float
    engine: str = "gloo"
    num_wrong: int = 0
    """Wrong elements of the result, summed over the ranks of the axis."""

    @property
    def algbw(self) -> float:
        """Size of the whole tensor / time, bytes/s."""
        return self.num_bytes / self.time_s

    @property
    def busbw(self) -> float:
        """Bytes that each rank sends in a ring / time, bytes/s."""
        return ring(self.op, self.num_ranks, self.num_bytes)[1] / self.time_s


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Latency and bandwidth fitted to the samples of one collective."""

    unit: Unit
    engine: str
    op: str
    num_ranks: int
    latency_s: float
    bandwidth: float
    largest_error: float
    """Largest relative error of the fit over its samples."""

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds that the fitted model predicts for a tensor of `num_bytes`."""
        hops, sent = ring(self.op, self.num_ranks, num_bytes)
        return hops * self.latency_s + sent / self.bandwidth


def run(config: CommConfig, say: PrintLine) -> BenchResult:
    """Measure the collectives, fit the links, and return the tables and the picture.

    Raises:
        ConfigError: there are too few ranks, or more than fit in this host's memory.
    """
    is_first = not is_under_torchrun() or read_rank_env().rank == 0
    path = None if config.write is None else calibration_file.path_of(config.write)
    num_ranks, num_here, device = _ranks_and_device(config)
    if device == "cpu":
        check_memory_for(num_here)
    samples = slowest_samples(
        run_ranks(time_rank, num_ranks, config, num_here, device=device, threads=config.threads)
    )
    fits = list(fit_samples(samples))
    # On CPUs the cores that compute also copy: the planner needs what a collective adds to a step.
    in_step = 1.0
    if device == "cpu":
        in_step = max(run_ranks(time_in_step, num_ranks, num_here, threads=config.threads))
    kept = "--write this saves the result for the planner, as the cluster 'this'"
    if path is not None and is_first:
        machine = calibration.blank("gpu" if device == "cuda" else "cpu")
        levels = levels_of(fits, num_here, in_step)
        num_hosts = num_ranks // num_here
        calibration_file.keep(
            path, dataclasses.replace(machine, levels=levels, num_hosts=num_hosts)
        )
        kept = f"wrote {path}"
    return BenchResult(
        name=f"comm-{device}",
        is_shown=is_first,
        shown=[
            f"Collectives of {num_ranks} ranks, {num_here} on a host, on {device}",
            _samples_table(samples),
            "size: of the full tensor; wrong: number of wrong elements on all ranks",
            _table(fits),
            "hop: its latency; GB/s: per rank, one way; both fitted to a ring of this time",
            kept,
        ],
        draw=functools.partial(draw_fits, samples, fits),
        values={
            "device": device,
            "num_ranks": num_ranks,
            "num_here": num_here,
            "fits": [values_of(one) for one in fits],
            "samples": [values_of(sample) for sample in samples],
        },
    )


def _samples_table(samples: Sequence[Sample]) -> Table:
    heads = (
        *("collective", "by", "ranks", Number("size, KiB", ".0f", KIB)),
        Number("time, us", ".1f", 1e-6),
        *(Number(f"{name}, GB/s", ".3g", 1e9) for name in ("algbw", "busbw")),
        Number("wrong", "d"),
    )
    rows = [
        (
            one.op,
            one.engine,
            str(one.num_ranks) if LEVEL_OF_AXIS[one.axis] == "server" else f"{one.num_ranks} hosts",
            *(one.num_bytes, one.time_s, one.algbw, one.busbw, one.num_wrong),
        )
        for one in samples
    ]
    return Table("", heads, rows, numbers=["ranks"])


def _table(fits: Sequence[Fit]) -> Table:
    heads = ("between", "by", "collective", Number("ranks", "d"), Number("hop, us", ".3g", 1e-6))
    heads += (Number("GB/s", ".3g", 1e9), Number("largest error", ".0%"))
    rows = [
        (
            *(LEVEL_WORDS[one.unit], one.engine, one.op, one.num_ranks),
            *(one.latency_s, one.bandwidth, one.largest_error),
        )
        for one in fits
    ]
    return Table("", heads, rows)


def _ranks_and_device(config: CommConfig) -> tuple[int, int, str]:
    """Return the number of ranks, the number of ranks on each host, and the device.

    Raises:
        ConfigError: there is one rank, fewer GPUs than ranks, or `ranks` contradicts torchrun.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = config.device
    if device == "auto":
        device = "cuda" if num_gpus >= 2 else "cpu"
    if is_under_torchrun():
        env = read_rank_env()
        if config.ranks not in (None, env.num_ranks):
            raise ConfigError(
                f"ranks is {config.ranks}, but torchrun has started {env.num_ranks} ranks; leave "
                "ranks out"
            )
        if env.num_ranks < 2:
            raise ConfigError(
                "torchrun has started 1 rank, but collectives need at least 2; start 2 or more"
            )
        return env.num_ranks, env.num_here, device
    ranks = config.ranks or (num_gpus if device == "cuda" else max(2, num_cores()))
    if device == "cuda" and not 2 <= ranks <= num_gpus:
        raise ConfigError(
            f"{ranks} ranks on CUDA: expected 2 or more, with a GPU each; found {num_gpus} GPUs"
        )
    return ranks, ranks, device


def time_rank(config: CommConfig, num_here: int) -> list[Sample]:
    """Time all collectives on this rank, with `num_here` ranks on each host."""
    num_ranks = torch.distributed.get_world_size()
    axes = {"dp": num_ranks // num_here, "tp": num_here}
    samples: list[Sample] = []
    if torch.distributed.get_backend() == "nccl":
        return list(_samples(config, Ranks(axes, "cuda"), "NCCL"))
    for engine, shares_memory in ENGINES.items():
        samples += _samples(config, Ranks(axes, shares_memory=shares_memory), engine)
    return sorted(samples, key=lambda sample: (sample.axis == "dp", OPS.index(sample.op)))


def _samples(config: CommConfig, comm: Ranks, engine: str) -> Iterator[Sample]:
    """Yield the samples of one engine, on the axes whose collectives that engine runs."""
    # 2 hosts of 4 ranks    tp: {0 1 2 3} {4 5 6 7}        dp: {0 4} {1 5} {2 6} {3 7}, all at once
    for axis in ("tp", "dp"):
        num = comm.size(axis)
        is_shared = isinstance(comm.engine(axis), SharedMemory)
        if num == 1 or is_shared != ENGINES.get(engine, False):
            continue
        for op in OPS:
            num_bytes = SMALLEST_BYTES
            while num_bytes <= config.max_mib << 20:
                call = TimedCollective(comm, op, axis, -(-num_bytes // 4 // num) * num)
                time_s = median_s(call.run, config.repeats) / (2 if op == "send" else 1)
                yield Sample(
                    axis=axis,
                    op=op,
                    num_ranks=num,
                    num_bytes=call.whole.nbytes,
                    time_s=time_s,
                    engine=engine,
                    num_wrong=call.num_wrong(),
                )
                num_bytes *= GROWTH


def slowest_samples(samples_by_rank: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return each sample of the slowest rank; a rank without a send partner takes no time."""
    return [
        max(same, key=lambda sample: sample.time_s) for same in zip(*samples_by_rank, strict=True)
    ]


def fit_samples(samples: Sequence[Sample]) -> Iterator[Fit]:
    """Yield the fit of each collective on each axis, in the order of the samples."""
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.axis, sample.engine, sample.op), []).append(sample)
    for (axis, engine, op), group in groups.items():
        num = group[0].num_ranks
        points = [(*ring(op, num, one.num_bytes), one.time_s) for one in group]
        latency_s, per_byte_s = fit(points)
        errors = [
            abs(hops * latency_s + sent * per_byte_s - time_s) / time_s
            for hops, sent, time_s in points
        ]
        yield Fit(
            unit=LEVEL_OF_AXIS[axis],
            engine=engine,
            op=op,
            num_ranks=num,
            latency_s=latency_s,
            bandwidth=1 / per_byte_s,
            largest_error=max(errors),
        )


def levels_of(fits: Sequence[Fit], num_here: int, in_step: float) -> tuple[Level, ...]:
    """Return the levels of a cluster, each with a link that has the all-reduce's fit.

    The link also stores the fits of the other collectives. On CPUs, only the engine of training
    counts; a collective there takes `in_step` times as long in a step as alone.
    """
    levels: list[Level] = []
    for unit in ("server", "cluster"):
        of_unit = [one for one in fits if one.unit == unit]
        engines = [one.engine for one in of_unit]
        if not of_unit:
            continue
        backend = TRAINING_ENGINE if TRAINING_ENGINE in engines else engines[0]
        of = {one.op: one for one in of_unit if one.engine == backend}
        whole = of["all_reduce"]
        link = Link(
            name=f"{backend} {'in a host' if unit == 'server' else 'between hosts'}",
            bandwidth=whole.bandwidth,
            latency_s=whole.latency_s,
            source=f"measured by phalanx bench comm on {whole.num_ranks} ranks",
            date=time.strftime("%Y-%m"),
            in_step=in_step,
            measured={
                op: OpCost(latency_s=one.latency_s, bandwidth=one.bandwidth)
                for op, one in of.items()
            },
        )
        num = whole.num_ranks if unit == "server" else whole.num_ranks * num_here
        levels.append(Level(name=unit, devices=num, link=link))
    return tuple(levels)
