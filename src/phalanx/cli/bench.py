"""`phalanx bench`: what this machine can do. Each verb prints a table, and keeps JSON if asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from rich.table import Table
from rich.text import Text

from phalanx.bench.picture import has_matplotlib
from phalanx.cli.screen import print_json, say, screen
from phalanx.config.command_line import read_command_line
from phalanx.errors import ConfigError, nearest

if TYPE_CHECKING:
    from phalanx.bench.verb import Found, ResultConfig, Say

SomeConfig = TypeVar("SomeConfig", bound="ResultConfig")

VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "ceiling": ("ceiling:CeilingConfig", "the highest rate of matrix products on one device"),
    "comm": ("collectives:CommConfig", "latency and bandwidth of collectives between ranks"),
    "cut": ("cut:CutConfig", "the time of each layer, and the best cut into stages"),
    "mfu": ("mfu:MfuConfig", "the MFU and HFU of a plain perceptron"),
    "scaling": ("scaling:ScalingConfig", "the speed-up of strategies over one rank, in turns"),
}
"""Verb -> its module of phalanx.bench with the class of its settings, and what it measures.

A module is loaded when it is asked for, since most load torch.
"""

MOVED: Final[Mapping[str, str]] = {
    "pipeline": "phalanx show 1f1b",
    "tensor": "python benchmarks/tensor/layouts.py",
}
"""What was a verb -> the command that does the same, from the folder of the repository."""


def run(argv: list[str]) -> int:
    """Run `phalanx bench` on its arguments and return the exit status.

    Raises:
        ConfigError: a setting is out of range, or this machine lacks what it asks for.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    verb, *words = argv
    if verb in MOVED:
        raise ConfigError(
            f"'{verb}' is no verb of bench any more; run `{MOVED[verb]}` in the repository"
        )
    if verb not in VERBS:
        raise ConfigError(
            f"'{verb}' is nothing that bench measures{nearest(verb, VERBS)}; it measures "
            f"{', '.join(VERBS)}"
        )
    module_name, _, schema_name = VERBS[verb][0].partition(":")
    module = import_module(f"phalanx.bench.{module_name}")

    def work(_: None) -> int:
        measure(words, verb, getattr(module, schema_name), module.run, prog=f"phalanx bench {verb}")
        return 0

    if verb != "comm":
        return work(None)
    from phalanx.launch.torchrun import run_verb  # its ranks may be on several hosts

    return run_verb(lambda: None, work)


def measure(
    words: list[str],
    name: str,
    schema: type[SomeConfig],
    run: Callable[[SomeConfig, Say], Found],
    prog: str,
) -> None:
    """Read the settings from the words after `prog`, measure by `run`, show and keep the findings.

    The benchmark has this name in its JSON.

    Raises:
        ConfigError: a setting is out of range, or this machine lacks what it asks for.
    """
    from phalanx.measure.logs import json_text

    words = ["--help"] if words[:1] == ["help"] else words
    config = read_command_line(words, schema, prog=prog)
    folder = None if config.out is None else Path(config.out)
    console = screen()

    def show(what: str | Table) -> None:
        # A console would read the brackets of a text as markup.
        console.print(Text(what) if isinstance(what, str) else what)

    with nullcontext() if folder is None else _made(folder):
        found = run(config, show)
    if not found.is_shown:
        return
    for what in found.shown:
        show(what)
    document = _document(name, found)
    if folder is not None:
        for path in _keep(found, f"{json_text(document)}\n", folder):
            say(console, f"wrote {path}")
        if found.draw is not None and not has_matplotlib():
            show("no picture: matplotlib is missing; pip install 'phalanx-train[plot]'")
    if config.json:
        print_json(document)


@contextmanager
def _made(folder: Path) -> Generator[None]:
    """Make a folder before anything is measured, so that a bad one costs no time.

    A folder that was made for a request that is refused is removed.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    _write(folder, lambda path: path.mkdir(parents=True, exist_ok=True))
    try:
        yield
    except ConfigError:
        with suppress(OSError):  # another process has written to one
            for each in new:
                each.rmdir()
        raise


def _document(name: str, found: Found) -> dict[str, object]:
    """Return what was found as one JSON document."""
    from phalanx.measure.environment import environment

    date = time.strftime("%Y-%m-%d")
    return {"benchmark": name, "date": date, **found.values, "environment": environment()}


def _keep(found: Found, text: str, folder: Path) -> Iterator[Path]:
    """Write what was found, `text` as JSON, and yield each file that is written."""
    files: dict[str, Callable[[Path], object]] = {
        "json": lambda path: path.write_bytes(text.encode())
    }
    files |= found.files
    if found.draw is not None and has_matplotlib():
        files["svg"] = found.draw
    for ending, write in files.items():
        path = folder / f"{found.name}.{ending}"
        _write(path, write)
        yield path


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give another folder with --out"
        ) from None


def _usage() -> str:
    lines = ["usage: phalanx bench VERB [OPTIONS]", "", "Measure this machine:", ""]
    lines += [f"  {verb:<8} {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join([*lines, "", "phalanx bench VERB --help lists a verb's options."])
