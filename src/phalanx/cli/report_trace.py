"""`phalanx report trace RUN`: merge the traces of all ranks into one file for Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional
from phalanx.errors import ConfigError
from phalanx.report.output import check_writable, print_json, writing
from phalanx.report.terminal import Terminal
from phalanx.storage import hint_of_missing


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Merge the profiled steps of all ranks into one file for https://ui.perfetto.dev.

    Clocks of hosts are corrected; their errors and the overlap of communication are printed.
    """

    run: Annotated[str | None, Positional("RUN")] = None
    """Folder of a run that was profiled, such as by `phalanx train --profile`."""
    out: str | None = None
    """File to write; RUN/trace/merged.json if unset."""
    steps: str | None = None
    """Steps to merge, as A-B or A; all profiled steps if unset."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def trace(argv: list[str]) -> int:
    """Run `phalanx report trace` and return the exit status.

    Raises:
        ConfigError: the run was not profiled, or an option does not fit.
    """
    config = read_command_line(argv, TraceConfig, prog="phalanx report trace")
    if config.run is None:
        raise ConfigError("RUN is missing; expected: phalanx report trace RUN")
    run = Path(config.run)
    if not run.is_dir():
        raise ConfigError(f"there is no run {run}{hint_of_missing(run)}")
    first, dash, last = (config.steps or "1-inf").partition("-")
    try:
        low, high = int(first), float(last if dash else first)
    except ValueError:
        raise ConfigError(f"--steps is {config.steps!r}; expected A-B, such as 3-4") from None
    out = Path(config.out) if config.out else run / "trace/merged.json"
    if config.out:
        check_writable(out, ".json")
    from phalanx.review.merge import merge

    with writing(out, "; give another file with --out"):
        merged = merge(run, out, lambda step: low <= step <= high)
    Terminal().show(*merged.parts())
    if config.json:
        print_json(merged)
    return 0
