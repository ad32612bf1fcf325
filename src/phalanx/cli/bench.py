"""`phalanx bench`: measure this machine. Each verb prints tables, and writes files with --out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from phalanx.config.command_line import read_command_line
from phalanx.errors import ConfigError, nearest
from phalanx.report.figure import NO_MATPLOTLIB, has_matplotlib
from phalanx.report.output import OTHER_FOLDER, json_text, print_json, writing
from phalanx.report.terminal import Terminal

if TYPE_CHECKING:
    from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig

SomeConfig = TypeVar("SomeConfig", bound="ResultConfig")

VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "ceiling": ("ceiling:CeilingConfig", "the highest rate of matrix products on one device"),
    "comm": ("collectives:CommConfig", "latency and bandwidth of collectives between ranks"),
    "cut": ("cut:CutConfig", "the time of each layer, and the best cut into stages"),
    "data": (
        "loader_rate:DataConfig",
        "the rate of a loader, beside the rate that the model takes",
    ),
    "faults": ("faults:FaultsConfig", "what lost ranks and hosts cost a run that continues itself"),
    "mfu": ("mfu:MfuConfig", "the MFU and HFU of a plain perceptron"),
    "scaling": ("scaling:ScalingConfig", "the speed-up of each method, and why it falls short"),
}
"""Verb -> its module in phalanx.bench with its settings class, and the quantity it measures.

A module is imported only when its verb runs, because most of them import torch.
"""

REMOVED_VERBS: Final[Mapping[str, str]] = {
    "pipeline": "phalanx show 1f1b",
    "tensor": "python benchmarks/tensor/layouts.py",
}
"""Removed verb -> command that replaces it, run in the folder of the repository."""


def run(argv: list[str]) -> int:
    """Run `phalanx bench` on its arguments and return the exit status.

    Raises:
        ConfigError: a setting is out of range, or needs hardware that this machine lacks.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        lines = ["usage: phalanx bench VERB [OPTIONS]", "", "Measure this machine:", ""]
        lines += [f"  {verb:<8} {text}" for verb, (_, text) in VERBS.items()]
        lines += ["", "phalanx bench VERB --help lists a verb's options."]
        print("\n".join(lines), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    verb, *words = argv
    if verb in REMOVED_VERBS:
        raise ConfigError(
            f"'{verb}' is no longer a verb of bench; run `{REMOVED_VERBS[verb]}` in the repository"
        )
    if verb not in VERBS:
        raise ConfigError(
            f"'{verb}' is not a verb of bench{nearest(verb, VERBS)}; the verbs are "
            f"{', '.join(VERBS)}"
        )
    module_name, _, schema_name = VERBS[verb][0].partition(":")
    module = import_module(f"phalanx.bench.{module_name}")

    def work(_: None) -> int:
        schema = getattr(module, schema_name)
        return measure(words, verb, schema, module.run, prog=f"phalanx bench {verb}")

    if verb not in ("comm", "scaling"):
        return work(None)
    from phalanx.launch.torchrun import run_verb  # their ranks may be on several hosts

    return run_verb(lambda: None, work)


def measure(
    words: list[str],
    name: str,
    schema: type[SomeConfig],
    run: Callable[[SomeConfig, PrintLine], BenchResult],
    prog: str,
) -> int:
    """Read the settings from `words`, call `run`, then print the result and write it to --out.

    Args:
        words: command line after `prog`.
        name: name of the benchmark in its JSON document.
        schema: dataclass of the settings.
        run: function that measures.
        prog: name of the command in --help.

    Returns:
        The exit code.

    Raises:
        ConfigError: a setting is out of range, or needs hardware that this machine lacks.
    """
    from phalanx.measure.environment import environment

    words = ["--help"] if words[:1] == ["help"] else words
    config = read_command_line(words, schema, prog=prog)
    folder = None if config.out is None else Path(config.out)
    terminal = Terminal(wraps=True)
    with nullcontext() if folder is None else _created_folder(folder):
        found = run(config, terminal.say)
    if not found.is_shown:
        return found.exit_code
    terminal.show(*found.shown)
    document = {"benchmark": name, "date": time.strftime("%Y-%m-%d"), **found.values}
    document["environment"] = environment()
    if folder is not None:
        text = f"{json_text(document)}\n"
        files: dict[str, Callable[[Path], object]] = {
            "json": lambda path: path.write_bytes(text.encode()),
            **found.files,
        }
        if found.draw is not None and has_matplotlib():
            files["svg"] = found.draw
        for ending, write in files.items():
            path = folder / f"{found.name}.{ending}"
            with writing(path, OTHER_FOLDER):
                write(path)
            terminal.say(f"wrote {path}")
        if found.draw is not None and not has_matplotlib():
            terminal.say(f"no picture: it needs {NO_MATPLOTLIB}")
    if config.json:
        print_json(document)
    return found.exit_code


@contextmanager
def _created_folder(folder: Path) -> Generator[None]:
    """Create the folder of the results before the measurement, so that an error costs no time.

    If the block raises ConfigError, remove the folders that were created.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    with writing(folder, OTHER_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except ConfigError:
        with suppress(OSError):  # another process wrote to a folder
            for each in new:
                each.rmdir()
        raise
