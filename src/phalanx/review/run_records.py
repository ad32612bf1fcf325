"""Read the records of a run, `metrics.jsonl`, as a stream; no torch.

    environment  placement  config  step  evaluation  memory  ranks ... | config  step ...  summary
    process 1, killed at a step: it has no summary                      | process 2, resumed

A resumed run appends to the same file: its first step replaces the record of that step and of all
later ones, which the new process takes again. Other records are of the last process only.
"""

from __future__ import annotations

import bisect
import json
import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from phalanx.errors import ConfigError, nearest
from phalanx.measure.spans import SPANS

METRICS: Final = "metrics.jsonl"

WINDOWS: Final = 1000
"""Records of kind "ranks", and of kind "routing", that are kept."""

Record = dict[str, Any]


@dataclass
class RunRecords:
    """The records of one run; each kind may be absent.

    Attributes:
        folder: the run's folder.
        environment: machine and versions of the last process.
        placement: places of the ranks of the last process.
        config: settings of the last process.
        summary: summary of the last process; empty if it was killed, or still runs.
        columns: name -> the value in each step record; NaN where a record has none.
        begin: index of the first step of the last process.
        evaluations: step -> loss and further metrics.
        ranks: the latest records of kind "ranks".
        memory: rank -> record of kind "memory".
        routing: step -> record of kind "routing", the latest.
        num_processes: processes, one after the other, that wrote records.
        num_damaged: lines that are no records.
        unit: what the loss is averaged over.
    """

    folder: Path
    environment: Record = field(default_factory=dict[str, Any])
    placement: Record = field(default_factory=dict[str, Any])
    config: Record = field(default_factory=dict[str, Any])
    summary: Record = field(default_factory=dict[str, Any])
    columns: dict[str, array[float]] = field(default_factory=lambda: {"step": array("d")})
    begin: int = 0
    evaluations: dict[int, Record] = field(default_factory=dict[int, Record])
    ranks: deque[Record] = field(default_factory=lambda: deque[Record](maxlen=WINDOWS))
    memory: dict[int, Record] = field(default_factory=dict[int, Record])
    routing: dict[int, Record] = field(default_factory=dict[int, Record])
    num_processes: int = 0
    num_damaged: int = 0
    unit: str = "tokens"

    @property
    def num_steps(self) -> int:
        """Number of steps with a record."""
        return len(self.columns["step"])

    @property
    def loss_unit(self) -> str:
        """Unit of the losses."""
        return "nats a token" if self.unit == "tokens" else f"mean over {self.unit}"

    def add(self, record: Record) -> None:
        """Add a line; raise KeyError, TypeError or ValueError if it is damaged."""
        kind = record["kind"]
        if kind == "step":
            self._add_step(record)
        elif kind == "evaluation":
            values = {name: each for name, each in record.items() if name not in ("kind", "time")}
            self.evaluations[int(record["step"])] = values
        elif kind == "config":
            self.config, self.summary, self.memory = record, {}, {}
            self.ranks.clear()
            self.begin = self.num_steps
            self.num_processes += 1
        elif kind in ("environment", "placement", "summary"):
            setattr(self, kind, record)
        elif kind == "routing":
            step = int(record["step"])
            for later in [each for each in self.routing if each >= step]:  # of a resumed run
                del self.routing[later]
            self.routing[step] = record
            if len(self.routing) > WINDOWS:
                del self.routing[next(iter(self.routing))]
        elif kind == "ranks":
            self.ranks.append(record)
        elif kind == "memory":
            self.memory[int(record["rank"])] = record

    def _add_step(self, record: Record) -> None:
        values = {
            name: math.nan if each is None else float(each)
            for name, each in record.items()
            if name != "time" and (each is None or isinstance(each, int | float))
        }
        step, steps = values["step"], self.columns["step"]
        if steps and step <= steps[-1]:  # taken again by a resumed run
            kept = bisect.bisect_left(steps, step)
            for column in self.columns.values():
                del column[kept:]
            self.begin = min(self.begin, kept)
            for later in [number for number in self.evaluations if number >= step]:
                del self.evaluations[later]
        self.unit = record.get("unit", self.unit)
        for name in values:
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * len(steps)
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))


def read_run(folder: Path) -> RunRecords:
    """Read the records of the run in `folder`.

    Raises:
        ConfigError: there is no such folder, or it has no records.
    """
    path = folder / METRICS
    if not path.is_file() and (folder / SPANS).is_dir():
        return RunRecords(folder)  # a loop of the user's own, profiled
    if not path.is_file():
        parent = folder.parent
        beside = [each.parent for each in parent.glob(f"*/{METRICS}")] if parent.is_dir() else []
        beside += [each.parent for each in Path("runs").glob(f"*/{METRICS}")]
        what = f"has no {METRICS}" if folder.is_dir() else "does not exist"
        near = nearest(str(folder), map(str, beside))
        raise ConfigError(f"{folder} {what}; expected the folder of a run{near}")
    records = RunRecords(folder)
    with path.open("rb") as lines:
        for line in lines:
            try:
                records.add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                records.num_damaged += 1
    return records


def newest_run(parent: Path = Path("runs")) -> Path:
    """Return the folder in `parent` whose records were written last.

    Raises:
        ConfigError: `parent` has no run.
    """
    files = list(parent.glob(f"*/{METRICS}"))
    if not files:
        raise ConfigError(
            f"there is no run in {parent}/; expected: phalanx report RUN, where RUN is the folder "
            "that a run printed last"
        )
    return max(files, key=lambda file: file.stat().st_mtime).parent
