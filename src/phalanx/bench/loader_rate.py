"""`phalanx bench data`: samples and bytes a second of a loader alone, beside what a model takes.

    loader alone    | batch | batch | batch |          samples / seconds
    step of a run   | data | forward | backward ... |  samples / (seconds - data): what it takes

A loader that yields fewer samples a second than the step takes makes every step wait for data.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast

from torch.utils.data import DataLoader, IterableDataset

from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig
from phalanx.config import TrainConfig
from phalanx.config.fields import Positional, Range
from phalanx.config.load import load_config
from phalanx.data.rows import count_rows, tensors_of
from phalanx.data.samples import Batch
from phalanx.errors import ConfigError
from phalanx.report.tabular import Number, Table
from phalanx.review.run_records import RunRecords, read_run
from phalanx.strategy import Strategy
from phalanx.train.job.request import function_named
from phalanx.train.job.resolve import resolve
from phalanx.train.text import loader_of

WORKERS: Final = (0, 1, 2)
"""Numbers of worker processes under which a DataLoader is timed."""

WARMUP_BATCHES: Final = 2
"""First batches, which start workers and fill caches."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(ResultConfig):
    """Measure a loader alone, of a run's text or your own, beside the step of a run."""

    run: Annotated[str | None, Positional("[RUN]")] = None
    """Folder of a run: its text is loaded, and the loader is compared with its step."""
    loader: str | None = None
    """MODULE:FUNCTION or FILE.py:FUNCTION that returns a torch DataLoader, instead of text."""
    seconds: Annotated[float, Range(0, ends="()")] = 3.0
    """Time to load, for each number of workers."""


@dataclass(frozen=True, kw_only=True)
class LoaderRate:
    """The rate of one loader in one process.

    Attributes:
        name: the loader, and its worker processes.
        num_samples: samples that were timed.
        seconds: their time.
        num_bytes: bytes of their tensors.
    """

    name: str
    num_samples: int
    seconds: float
    num_bytes: int

    @property
    def samples_per_s(self) -> float:
        """Samples a second."""
        return self.num_samples / self.seconds


def run(config: DataConfig, say: PrintLine) -> BenchResult:
    """Time the loader, and compare it with the step of the run.

    Raises:
        ConfigError: there is neither a run with text nor a loader, or they cannot be read.
    """
    records = None if config.run is None else read_run(Path(config.run))
    rates: list[LoaderRate] = []
    if config.loader is not None:
        loader = function_named(config.loader, "loader")()
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"loader is {config.loader!r}, which returned {type(loader).__name__}; expected a "
                "torch.utils.data.DataLoader"
            )
        for num_workers in WORKERS:
            name = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
            say(f"loading with {name}")
            rates.append(time_loader(name, with_workers(loader, num_workers), config.seconds))
    elif config.run is not None and (settings := Path(config.run) / "config.toml").is_file():
        loaded = load_config(["--config", str(settings)], TrainConfig).config
        job = resolve(dataclasses.replace(loaded, resume=None, init=None))
        with loader_of(job, 0) as text:
            rates.append(
                time_loader("text", (each for step in text for each in step), config.seconds)
            )
    else:
        raise ConfigError(
            f"run is {config.run}; expected the folder of a run on text, or --loader "
            "MODULE:FUNCTION that returns a DataLoader"
        )
    taken = None if records is None else samples_taken(records)
    heads = ("loader", Number("samples/s", ",.1f"), Number("MB/s", ",.2f", 1e6), "the model takes")
    rows = [
        (
            rate.name,
            rate.samples_per_s,
            rate.num_bytes / rate.seconds,
            None if taken is None else f"{taken:,.1f} samples/s",
        )
        for rate in rates
    ]
    best = max(rates, key=lambda rate: rate.samples_per_s)
    verdict = "Give the folder of a run to compare the loader with its step: phalanx bench data RUN"
    if taken is not None:
        ratio = best.samples_per_s / taken
        verdict = (
            f"The loader ({best.name}) yields {ratio:.3g} times the samples that a rank of the "
            f"model takes: {'the model' if ratio >= 1 else 'the loader'} limits the run."
        )
    values = [vars(rate) | {"samples_per_s": rate.samples_per_s} for rate in rates]
    return BenchResult(
        name="data",
        shown=[Table("A loader alone, in one process", heads, rows), verdict],
        values={"loaders": values, "taken_samples_per_s": taken},
    )


def time_loader(name: str, batches: Iterable[Any], seconds: float) -> LoaderRate:
    """Load for about `seconds`, or until `batches` end.

    Raises:
        ConfigError: the loader has too few batches to time.
    """
    num_samples = num_bytes = 0
    begun_s = now_s = time.perf_counter()
    number = -1
    for number, batch in enumerate(batches):
        now_s = time.perf_counter()
        if number < WARMUP_BATCHES:
            begun_s = now_s
            continue
        rows = vars(batch) if isinstance(batch, Batch) else batch
        num_samples += count_rows(rows)
        num_bytes += sum(tensor.nbytes for tensor in tensors_of(rows))
        if now_s - begun_s > seconds:
            break
    if not num_samples:
        raise ConfigError(
            f"the loader ({name}) has {number + 1} batches; expected more than {WARMUP_BATCHES}"
        )
    return LoaderRate(
        name=name, num_samples=num_samples, seconds=now_s - begun_s, num_bytes=num_bytes
    )


def with_workers(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """Return a loader of the same batches with `num_workers` worker processes."""
    drawn: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if loader.batch_sampler is None:
        drawn = {"batch_size": None, "sampler": loader.sampler}
    elif isinstance(loader.dataset, IterableDataset):
        drawn = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return DataLoader(
        cast(Any, loader.dataset),
        num_workers=num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        **drawn,
    )


def samples_taken(run: RunRecords) -> float | None:
    """Return the samples a second that one data rank of a run takes, without its data term."""
    names = ("tokens", "wall_s", "data_s")
    if not run.num_steps or any(name not in run.columns for name in names):
        return None
    tokens, wall_s, data_s = (statistics.median(run.columns[name][run.begin :]) for name in names)
    corpus = run.config.get("corpus") or {}
    per_sample = corpus.get("seq_len", 1) if run.unit == "tokens" else 1
    ranks = Strategy.parse(str(run.config["strategy"])).data_ranks
    return tokens / per_sample / ranks / max(wall_s - data_s, 1e-9)
