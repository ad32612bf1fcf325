"""Logs of a run: metrics.jsonl, TensorBoard scalars and the console, all from the same values.

One process writes the logs of the whole run. `metrics.jsonl` is flushed at every line, so that a
run that stops early keeps all its records; a resumed run appends to the same file. JSON cannot
represent a number that is not finite: such a value is null, and the field `<name>_text` next to it
is "nan", "inf" or "-inf".
"""

from __future__ import annotations

import inspect
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from phalanx.errors import CheckpointError, ConfigError, TrainingError, wrapped
from phalanx.measure.timer import StepTimes
from phalanx.measure.utilization import percent
from phalanx.storage import open_to_append

METRICS_FILE = "metrics.jsonl"

LINES_S = 10.0
"""Least seconds between lines without a progress bar; the first and last step always print."""

_WIDTH_FOR_BAR = 90
_BAR = 10
_GAPS = 3
"""Total columns of the gaps between the parts of the display."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of one optimizer step, over all ranks."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the valid tokens of the global batch, in nats."""
    grad_norm: float
    """Norm of the full gradient before clipping."""
    lr: float
    tokens: int
    """Tokens of the global batch."""
    tokens_per_s: float
    mfu: float | None
    """Causal MFU in [0, 1]; None if no peak is known, or if it would be above 1."""
    mfu_of: str = "ceiling"
    """The peak that the MFU is relative to: "ceiling" or "data sheet"."""
    times: StepTimes
    unit: str = "tokens"
    """Unit of `tokens`: "samples" if the loss is a mean over samples."""
    skipped: bool = False
    """Whether the update was skipped because the loss or the gradient was not finite."""


class LiveDisplay:
    """The console display of a run: a progress bar on a terminal, else occasional plain lines."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._shown_s = -math.inf
        self._first: tuple[int, float] | None = None
        self._has_bar = console.width >= _WIDTH_FOR_BAR
        self._progress = Progress(
            TextColumn("{task.fields[step]}"),
            *([BarColumn(bar_width=None)] if self._has_bar else []),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            expand=True,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(
            "", total=total_steps, step=f"step 0/{total_steps}", numbers=""
        )
        if console.is_terminal:
            self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        now_s = time.monotonic()
        words = f"step {record.step}/{self._total_steps}"
        left = self._time_left(record.step, now_s)
        if self._console.is_terminal:
            width = self._console.width - len(words) - _GAPS - (_BAR if self._has_bar else 0)
            numbers = step_text(record, left, width)
            self._progress.update(self._task, completed=record.step, step=words, numbers=numbers)
        elif (
            now_s - self._shown_s >= LINES_S
            or record.step >= self._total_steps
            or not math.isfinite(record.loss)
        ):
            self._shown_s = now_s
            self.say(f"{words}  {step_text(record, left)}")

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        shown = wrapped(line, self._console.width) if self._console.is_terminal else line
        self._console.print(Text(shown), soft_wrap=True)

    def close(self) -> None:
        """Stop the display; its last state stays on the screen."""
        if self._console.is_terminal:
            self._progress.stop()

    def _time_left(self, step: int, now_s: float) -> str:
        # From the end of the first step seen: without its warm-up, or the steps before a resume.
        first_step, first_s = self._first = self._first or (step, now_s)
        if step <= first_step:
            return "left --:--"
        left_s = (now_s - first_s) / (step - first_step) * max(self._total_steps - step, 0)
        return f"left {_clock(left_s)}"


class RunLog:
    """A writer and display of the records of one run; a context manager, or call `close`."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        total_steps: int,
        log: Callable[[str, Mapping[str, Any]], object] | None = None,
    ) -> None:
        """Open the log files; create the run's folder if it does not exist.

        `log` is also called with the kind and the values of each record.

        Raises:
            ConfigError: the folder cannot be written.
            CheckpointError: a record would be written through a link to a place outside `folder`.
        """
        self.folder = folder
        self._log = log
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "tensorboard").is_symlink():
                raise CheckpointError(
                    f"{folder / 'tensorboard'} is a link, but records are written only to the "
                    "run's own folder; move the link away, or give another folder"
                )
            (folder / "tensorboard").mkdir(exist_ok=True)
            self._file = open_to_append(folder / METRICS_FILE)
            _cut_half_line(folder / METRICS_FILE)
        except OSError as error:
            raise ConfigError(
                f"cannot write the run's records to {error.filename or folder}: {error.strerror}; "
                "give another folder with --out"
            ) from None
        # Imported here because it takes a second, which ranks that write no logs need not spend.
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)
        self._hook_before, threading.excepthook = threading.excepthook, self._on_thread_error
        self.display = LiveDisplay(console, total_steps)

    def step(self, record: StepRecord) -> None:
        """Write and display the record of a step."""
        values = {**vars(record)}
        del values["times"]
        terms_s = {f"{term}_s": seconds for term, seconds in record.times.terms_s.items()}
        terms_s["wall_s"] = record.times.wall_s
        self.note("step", values | terms_s)
        for name in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu"):
            if values[name] is not None:
                self._add_scalar(f"train/{name}", values[name], record.step)
        for name, seconds in terms_s.items():
            self._add_scalar(f"time/{name}", seconds, record.step)
        self.display.step(record)

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Write and display the validation loss after `step`, and further metrics."""
        values = {"loss": loss, **metrics}
        self.note("evaluation", {"step": step, **values})
        for name, value in values.items():
            self._add_scalar(f"validation/{name}", value, step)
        words = [f"loss {loss:.4f}"]
        for name, value in metrics.items():
            is_unit = name == "bits_per_byte"
            words.append(f"{value:.4f} bits per byte" if is_unit else f"{name} {value:.4f}")
        self.display.say(f"validation after step {step}: {', '.join(words)}")

    def note(self, kind: str, values: Mapping[str, object]) -> None:
        """Write any record, such as the environment or the summary, as one line of JSON.

        Raises:
            TrainingError: the run's folder was moved or removed, or the file cannot be written.
        """
        if not self.folder.is_dir():  # open files move with a folder, new ones would be made here
            raise TrainingError(
                f"{self.folder}, the folder of this run, was moved or removed during the run; its "
                "records and checkpoints must stay in one folder, so the run ends"
            )
        line = {"kind": kind, "time": time.time(), **values}
        try:
            self._file.write(json_text(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritten(METRICS_FILE, error) from error
        if self._log is not None:
            self._log(kind, values_of(values))

    def _add_scalar(self, curve: str, value: float, step: int) -> None:
        """Add a point to a TensorBoard scalar."""
        try:
            self._writer.add_scalar(curve, value, step)
        except OSError as error:
            raise self._unwritten("tensorboard", error) from error

    def _unwritten(self, name: str, error: OSError) -> TrainingError:
        unwritten = TrainingError(f"cannot write {self.folder / name}: {error.strerror}")
        unwritten.exit_code = 2  # as when a checkpoint does not fit on a full disk
        return unwritten

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Print no traceback for TensorBoard's writer thread: the next point raises its error."""
        is_its = type(args.thread).__module__.startswith("tensorboard.")
        if not (is_its and isinstance(args.exc_value, OSError)):
            self._hook_before(args)

    def close(self) -> None:
        """Flush and close the files and end the display."""
        self.display.close()
        with suppress(OSError):  # each line was flushed, and raised its own write error
            self._file.close()
        with suppress(OSError):
            if self.folder.is_dir():  # else TensorBoard's thread would print a traceback
                self._writer.close()
        threading.excepthook = self._hook_before

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def step_text(record: StepRecord, left: str = "", width: float = math.inf) -> str:
    """Return the display text of a step; drop the less important numbers to fit `width`."""
    loss = f"loss {record.loss:.4f}" + ("  SKIPPED" if record.skipped else "")
    rate = f"{record.tokens_per_s:,.0f} {record.unit}/s"
    share = "" if record.mfu is None else f"MFU {percent(record.mfu)}"
    share_of = share and f"{share} of {record.mfu_of}"
    for parts in (
        (loss, rate, share_of, left),
        (loss, rate, share, left),
        (loss, rate, left),
        (loss, left),
    ):
        text = "  ".join(filter(None, parts))
        if len(text) <= width:
            return text
    return loss


def has_steps(folder: Path) -> bool:
    """Return whether `metrics.jsonl` in `folder` has the record of a step."""
    with suppress(OSError), (folder / METRICS_FILE).open(encoding="utf-8") as records:
        return any('"kind": "step"' in line for line in records)
    return False


def values_of(value: Any) -> Any:
    """Return a value as plain JSON types: `as_dict()`, or a dataclass's fields and properties.

    Numbers that are not finite become None, see the top of this file.
    """
    if hasattr(value, "as_dict"):
        return values_of(value.as_dict())
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, _ in inspect.getmembers(type(value), inspect.isdatadescriptor)]
        return values_of({name: getattr(value, name) for name in names if name[0] != "_"})
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for name, inner in cast("Mapping[object, Any]", value).items():
            plain[str(name)] = values_of(inner)
            if isinstance(inner, float) and not math.isfinite(inner):
                plain[f"{name}_text"] = str(inner)
        return plain
    if isinstance(value, (list, tuple)):
        return [values_of(inner) for inner in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: object) -> str:
    """Return `values_of(value)` as one line of valid JSON."""
    return json.dumps(values_of(value), ensure_ascii=False, allow_nan=False)


def _cut_half_line(file: Path) -> None:
    """Truncate an incomplete last line, left by a crash, so that the next record is readable."""
    with suppress(FileNotFoundError), file.open("rb+") as records:
        size = kept = records.seek(0, os.SEEK_END)
        while kept > 0:
            start = max(0, kept - 4096)
            records.seek(start)
            newline = records.read(kept - start).rfind(b"\n")
            kept = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        if kept < size:
            records.truncate(kept)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
