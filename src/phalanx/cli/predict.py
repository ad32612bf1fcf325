"""`phalanx predict`: predict time and memory of published runs, or report the errors in time."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from phalanx.cli.screen import Preparation, print_json, screen
from phalanx.config.command_line import read_command_line
from phalanx.errors import ConfigError, PhalanxError
from phalanx.planner import published
from phalanx.storage import read_text

NEEDED: Final = ("id", "hardware", "num_gpus", "model", "seq_len", "parallel")
"""Required fields of a run."""

ANY_VALUE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that unexpected values in the fields of a run can cause."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Predict time and memory of published runs, of which a file has one JSON object a line.

    Without --json, the table has the error of each group of runs whose time was measured.
    """

    runs: str | None = None
    """The file of the runs."""
    json: bool = False
    """Print one JSON object a run: id, step_time_s, tokens_per_s_per_device, memory_bytes, fits; or
    id and error."""


def run(argv: list[str]) -> int:
    """Run `phalanx predict` and return the exit code.

    Raises:
        ConfigError: the file cannot be read, or a line of it is not a JSON object with an id.
    """
    config = read_command_line(argv, PredictConfig, prog="phalanx predict")
    if config.runs is None:
        raise ConfigError("--runs is missing; expected: phalanx predict --runs FILE.jsonl")
    rows = rows_of(Path(config.runs))
    if config.json:
        for row in rows:
            print_json(predicted(row))
        return 0
    console = screen()
    with Preparation(console) as preparation:
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for number, row in enumerate(rows):
            preparation.report("pricing runs", number, len(rows))
            found.append((row, _with_measured_time(row, predicted(row))))
    console.print(table(found))
    return 0


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file.

    Raises:
        ConfigError: the file cannot be read or has no runs, or a line is not an object with an id.
    """
    lines = read_text(path).splitlines()
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path} has no runs; expected one object a line, with {_fields()}")
    return rows


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, line {number} is not valid JSON: {error}; expected one object a line"
        ) from None
    if not isinstance(row, dict) or "id" not in row:
        raise ConfigError(f"{path}, line {number} has no id; expected an object with {_fields()}")
    return row


def _fields() -> str:
    return ", ".join(NEEDED)


def predicted(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prediction for a run, or its id and the error."""
    missing = [name for name in NEEDED if row.get(name) is None]
    if missing:
        return {"id": row["id"], "error": f"the run lacks {', '.join(missing)}"}
    try:
        run = published.read(row)
        step_s = published.seconds(run)
        memory_bytes, fits = published.held(run)
    except PhalanxError as error:
        return {"id": row["id"], "error": str(error)}
    except ANY_VALUE as error:
        return {"id": row["id"], "error": _unexpected(row, error)}
    tokens = run.planned.num_sequences * run.planned.seq_len
    return {
        "id": row["id"],
        "step_time_s": step_s,
        "tokens_per_s_per_device": tokens / step_s / row["num_gpus"],
        "memory_bytes": memory_bytes,
        "fits": fits,
    }


def table(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    """Return a table with the number of runs and the mean error of step time of each group."""
    groups: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for pair in found:
        groups[str(pair[0].get("group", "no group"))].append(pair)
    drawn = Table()
    for head in ("group", "runs", "errors", "measured", "mean error", "fit"):
        drawn.add_column(head, justify="left" if head == "group" else "right", no_wrap=True)
    for name, pairs in [*groups.items(), ("all", found)]:
        drawn.add_row(*map(Text, _cells(name, pairs)))
    return drawn


def _cells(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    answers = [answer for _, answer in pairs if "error" not in answer]
    errors = [
        abs(answer["step_time_s"] / answer["measured_s"] - 1)
        for answer in answers
        if "measured_s" in answer
    ]
    yield from (name, f"{len(pairs):,}", f"{len(pairs) - len(answers):,}", f"{len(errors):,}")
    yield f"{statistics.mean(errors):.1%}" if errors else ""
    yield f"{sum(answer['fits'] for answer in answers):,}"


def _with_measured_time(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction with any measured step time; an error if that time is illegal."""
    if "error" in answer or not isinstance(row.get("measured"), dict):
        return answer
    try:
        step_s = published.measured_s(row, published.read(row).planned.shape)
        if step_s is not None and not 0 < step_s < math.inf:
            raise ValueError(f"the measured step takes {step_s} s; expected a time above 0")
    except ANY_VALUE as error:
        return {"id": row["id"], "error": _unexpected(row, error)}
    return answer if step_s is None else answer | {"measured_s": step_s}


def _unexpected(row: Mapping[str, Any], error: Exception) -> str:
    """Return the message for an exception that the fields of a run caused."""
    return f"run {row['id']}: a field has an unexpected value ({type(error).__name__}: {error})"
