"""`phalanx train`: train a decoder on text, or with --script a user's job."""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from phalanx.account.parameters import num_parameters
from phalanx.cli import script
from phalanx.config import TrainConfig
from phalanx.config.fields import value_at
from phalanx.config.help import show_config
from phalanx.config.load import Loaded, load_config, missing_path_notes
from phalanx.errors import PhalanxError
from phalanx.models.registry import PRESETS
from phalanx.report.output import print_json
from phalanx.report.terminal import Preparation, Terminal
from phalanx.report.units import count_text
from phalanx.strategy import built

if TYPE_CHECKING:
    from phalanx.train.job.request import Request
    from phalanx.train.job.resolve import Job


def run(argv: list[str]) -> int:
    """Run `phalanx train`: train and print the summary; return the exit code."""
    if script.has_script_option(argv):
        return script.train(argv)
    from phalanx.launch.torchrun import run_verb
    from phalanx.train.job.request import settle
    from phalanx.train.job.resume import continuation

    def prepare() -> tuple[Loaded[TrainConfig], Request]:
        try:
            loaded = load_config(argv, TrainConfig, revise=continuation)
        except SystemExit:
            if {"-h", "--help"}.intersection(argv):
                of_scripts = script.script_help("train", script.ScriptTrainConfig)
                print(f"{of_scripts}\n\n{_strategy_help()}\n\n{_preset_help()}")
            raise
        try:
            return loaded, settle(loaded.config)
        except PhalanxError as error:
            for line in missing_path_notes(loaded):
                error.add_note(line)
            raise

    return run_verb(prepare, lambda prepared: _run(*prepared))


def _settled(loaded: Loaded[TrainConfig], request: Request) -> Loaded[TrainConfig]:
    """Return the resolved settings; a changed one has a checkpoint or "derived" as its source."""
    config, sources = request.settings(), dict(loaded.sources)
    for key, source in loaded.sources.items():
        given = value_at(loaded.config, key)
        if request.start is not None and value_at(request.config, key) != given:
            sources[key] = str(request.start.folder)
        elif source == "default" and value_at(config, key) != given:
            sources[key] = "derived"
    return dataclasses.replace(loaded, config=config, sources=sources)


def _run(loaded: Loaded[TrainConfig], request: Request) -> int:
    from phalanx.launch.local import prepare_server
    from phalanx.launch.rank_env import is_under_torchrun

    if not loaded.show_config and not is_under_torchrun():
        prepare_server("phalanx.train.run")  # imports torch beside this process, which does so next
    from phalanx.cli.layout import tables_of
    from phalanx.train.job.resolve import remarks_on, words_of
    from phalanx.train.run import run

    if loaded.show_config:
        from phalanx.parallel.pipeline.cut import schedule_of
        from phalanx.parallel.pipeline.schedule_file import text_of

        strategy, lines = request.strategy, list[str]()
        if strategy.pp.degree > 1:
            lines = text_of(schedule_of(strategy, request.batch.accumulation))
        show_config(_settled(loaded, request), lines)
        return 0
    terminal = Terminal()
    with ExitStack() as preparing:
        # Bars of several ranks would overwrite each other.
        preparation = Preparation(terminal, has_bar=not is_under_torchrun())
        preparing.enter_context(preparation)

        def announce(job: Job) -> None:
            preparing.close()
            for line in words_of(job):
                terminal.say(line)
            for line in remarks_on(job):
                terminal.say(line, "yellow")
            terminal.show(*tables_of(job.strategy, job.shape, job.batch.accumulation))

        summary = run(request, announce, preparation.report)
    if summary is None:
        terminal.say(f"worker {request.config.server.worker} is done; worker 0 has the summary")
    elif os.environ.get("RANK", "0") == "0":
        Terminal(wraps=True).show(*summary.parts(report=request.config.report))
        if loaded.json:
            print_json(summary)
    return 0


def _strategy_help() -> str:
    """Return the help on strategies, with one line for each."""
    forms = built() | {
        "cut:4+5": "layers of each stage of pp, counting embedding and head",
        "schedule:FILE": "the schedule of pp in a file, as --show-config prints it",
    }
    width = max(map(len, forms))
    head = "strategies, joined by commas, such as dp2,fsdp2,recompute:full (dp with fsdp is HSDP):"
    return "\n".join([head, *(f"  {form:<{width}}  {about}" for form, about in forms.items())])


def _preset_help() -> str:
    """Return the help on presets, with the parameters of each, several in a line."""
    sizes = {name: count_text(num_parameters(shape).total) for name, shape in PRESETS.items()}
    cells = [f"{name} {size}" for name, size in sizes.items()]
    width = max(map(len, cells)) + 2
    num_columns = max(1, 78 // width)
    rows = [cells[at : at + num_columns] for at in range(0, len(cells), num_columns)]
    lines = ["  " + "".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    return "\n".join(["presets of --model, with their parameters:", *lines])
