"""`phalanx report`: what a run's records say, on the screen, as JSON and as one HTML file.

`phalanx report trace RUN` merges the traces of all ranks into one file for Perfetto.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional
from phalanx.errors import ConfigError
from phalanx.report.html import page
from phalanx.report.output import check_writable, print_json, writing
from phalanx.report.tabular import Line, Part, Table
from phalanx.report.terminal import Terminal
from phalanx.review.compare import sections_of_comparison
from phalanx.review.run_records import newest_run, read_run
from phalanx.review.sections import sections_of_run
from phalanx.storage import hint_of_missing

MAX_ROWS: Final = 24
"""Most rows of a table on the screen; the page has all."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Say where time, bytes and memory of a run went, beside the plan; compare several runs.

    `phalanx report trace RUN` merges the profiled steps of all ranks into one file for Perfetto.
    """

    runs: Annotated[tuple[str, ...], Positional("RUN")] = ()
    """Folders of runs; unset: the newest in runs/."""
    html: str | None = None
    """The page to write; unset: report.html in the folder of the run."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def run(argv: list[str]) -> int:
    """Print the report, write the page, and return 0.

    Raises:
        ConfigError: a folder has no records of a run, or the page cannot be written.
    """
    if argv[:1] == ["trace"]:
        return trace(argv[1:])
    config = read_command_line(argv, ReportConfig, prog="phalanx report")
    folders = [Path(each) for each in config.runs] or [newest_run()]
    name = "report.html" if len(folders) == 1 else "comparison.html"
    html = folders[0] / name if config.html is None else Path(config.html)
    if config.html is not None:
        check_writable(html, ".html")
    runs = [read_run(folder) for folder in folders]
    reports = [[*sections_of_run(run)] for run in runs]
    document: dict[str, Any] = {
        "runs": [{each.title: each.values() for each in sections} for sections in reports]
    }
    sections, title = reports[0], f"Report of {folders[0].resolve().name}"
    place = "/runs/0"
    if len(runs) > 1:
        sections, title = [*sections_of_comparison(runs)], f"{len(runs)} runs compared"
        place = "/comparison"
        document["comparison"] = {each.title: each.values() for each in sections}
    with writing(html, "; give another file with --html"):
        html.write_text(page(title, sections, place), encoding="utf-8")
    terminal = Terminal()
    for number, section in enumerate(sections):
        parts: list[Part] = [p for p in section.parts if isinstance(p, str | Line | Table)]
        if not parts or section.is_detail:
            continue
        if number:
            terminal.say(f"\n{section.title}", "bold")
        for part in parts:
            if isinstance(part, Table) and len(part.rows) > MAX_ROWS:
                note = f"... and {len(part.rows) - MAX_ROWS} rows more on the page. {part.note}"
                part = replace(part, rows=part.rows[:MAX_ROWS], note=note)
            terminal.show(part)
    terminal.say(f"\npage        {html}", wraps=False)
    if config.json:
        print_json(document)
    return 0


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
