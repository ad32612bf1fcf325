"""`phalanx report`: what a run's records say, on the screen, as JSON and as one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Positional
from phalanx.report.html import page
from phalanx.report.output import check_writable, print_json, writing
from phalanx.report.tabular import Line, Part, Table
from phalanx.report.terminal import Terminal
from phalanx.review.compare import sections_of_comparison
from phalanx.review.run_records import newest_run, read_run
from phalanx.review.sections import sections_of_run

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
        return import_module("phalanx.cli.report_trace").trace(argv[1:])
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
        terminal.show(*map(_cut, parts))
    terminal.say(f"\npage        {html}", wraps=False)
    if config.json:
        print_json(document)
    return 0


def _cut(part: Part) -> Part:
    if not isinstance(part, Table) or len(part.rows) <= MAX_ROWS:
        return part
    note = f"... and {len(part.rows) - MAX_ROWS} rows more on the page. {part.note}"
    return Table(part.title, part.heads, part.rows[:MAX_ROWS], part.numbers, note)
