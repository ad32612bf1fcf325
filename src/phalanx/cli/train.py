"""`phalanx train`: the main job."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.choices import preset_help, strategy_help
from phalanx.cli.config_view import show_config
from phalanx.cli.screen import Preparation, print_json, screen
from phalanx.config import TrainConfig
from phalanx.config.fields import value_at
from phalanx.config.law import check
from phalanx.config.load import Loaded, load_config
from phalanx.config.load import resolve as resolve_config
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.train.job.resolve import Job


def run(argv: list[str]) -> int:
    """Train as the command line says and print what was measured."""
    from phalanx.launch import slurm
    from phalanx.launch.torchrun import is_under_torchrun, leave, leave_failed
    from phalanx.train.job.request import judge

    slurm.adopt()
    try:
        loaded = load_config(argv, TrainConfig)
        check(loaded.config)
        if not loaded.show_config:
            judge(loaded.config)
    except PhalanxError as error:
        if is_under_torchrun():
            leave_failed(error, is_everyones=True)
        raise
    except SystemExit:
        if {"-h", "--help"}.intersection(argv):
            print(f"{strategy_help()}\n\n{preset_help()}")
        raise
    if loaded.show_config:
        from phalanx.train.job.resolve import choose_strategy

        strategy, _ = choose_strategy(loaded.config)
        loaded = _as_before(loaded, strategy.data_ranks)
        show_config(resolve_config(loaded, strategy.num_ranks))
        return 0
    if not is_under_torchrun():
        return _run(loaded.config, loaded.json)
    try:
        leave(_run(loaded.config, loaded.json))
    except BaseException as error:
        leave_failed(error)


def _as_before(loaded: Loaded[TrainConfig], num_data_ranks: int) -> Loaded[TrainConfig]:
    """Fill in what a run that goes on takes from its checkpoint."""
    if loaded.config.resume is None:
        return loaded
    from phalanx.checkpoint import manifest
    from phalanx.train.job.resume import as_before

    folder, about = manifest.find_and_read(Path(loaded.config.resume))
    config = as_before(loaded.config, about, num_data_ranks)
    sources = {
        key: source if value_at(config, key) == value_at(loaded.config, key) else str(folder)
        for key, source in loaded.sources.items()
    }
    return dataclasses.replace(loaded, config=config, sources=sources)


def _run(config: TrainConfig, as_json: bool) -> int:
    from phalanx.launch.local import prepare_server
    from phalanx.launch.torchrun import is_under_torchrun
    from phalanx.train.job.resolve import resolve
    from phalanx.train.loop import start, train

    console = screen()
    if is_under_torchrun():
        preparation = Preparation(console, has_bars=False)  # whose lines meet those of other ranks
        summary = train(config, lambda job: _announce(job, console), preparation.report)
    else:
        prepare_server()
        with Preparation(console) as preparation:
            job = resolve(config, preparation.report)
        _announce(job, console)
        summary = start(job)
    if os.environ.get("RANK", "0") == "0":
        console.print(summary.render(report=config.report), crop=False)
        if as_json:
            print_json(summary.as_dict())
    return 0


def _announce(job: Job, console: Console) -> None:
    """Say what is about to run, and how that differs from the run it goes on with."""
    from phalanx.train.job.resolve import remarks_on, words_of

    for line in words_of(job):
        console.print(Text(line), soft_wrap=True)
    for line in remarks_on(job):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    if job.strategy.tp.degree > 1:
        console.print(_split_table(job))


def _split_table(job: Job) -> Table:
    """Draw what tp does to each parameter."""
    from phalanx.parallel.plan import plan_decoder

    table = Table(title="What tp does to each parameter", title_justify="left", box=None)
    for name in ("parameter", "role", "full shape, split over", "a rank's shard"):
        table.add_column(name)
    for row in plan_decoder(job.strategy, job.shape).table():
        shard = " x ".join(map(str, row.shard))
        table.add_row(Text(row.name), row.role, Text(row.notation), shard)
    return table
