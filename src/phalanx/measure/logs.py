"""The records of a run: metrics.jsonl, TensorBoard scalars and the console, from the same values.

One process writes them, for the whole run. `metrics.jsonl` is flushed at every line, so a run that
ends early keeps all it had measured; a run that goes on appends to the same file. JSON has no word
for a number that is not finite: such a value is null, and `<name>_text` beside it says "nan",
"inf" or "-inf".
"""

from __future__ import annotations

import inspect
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from phalanx.errors import ConfigError, TrainingError
from phalanx.measure.timer import StepTimes
from phalanx.measure.utilization import percent

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

METRICS_FILE = "metrics.jsonl"
_WIDTH_FOR_BAR = 90
_BAR = 10
_GAPS = 3
"""Columns between the parts of the display."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is kept of one optimizer step, over all ranks."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the valid tokens of the global batch, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    tokens: int
    """Tokens of the global batch."""
    tokens_per_s: float
    mfu: float | None
    """Causal MFU in [0, 1]; None if no peak is known, or if it would be above 1."""
    mfu_of: str = "ceiling"
    """What the MFU is a share of: "ceiling" or "data sheet"."""
    times: StepTimes | None = None
    skipped: bool = False
    """Whether the step was left out because loss or gradient was not finite."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """What is kept of one measurement of the validation loss."""

    step: int
    """Optimizer steps done before it."""
    loss: float
    """Mean over the valid tokens, in nats."""
    bits_per_byte: float | None = None


class LiveDisplay:
    """Shows a run on a console: a progress bar on a terminal, else one plain line now and then."""

    def __init__(self, console: Console, total_steps: int, interval_s: float = 10.0) -> None:
        """Begin the display.

        Args:
            console: where to show it.
            total_steps: the number of the last step.
            interval_s: seconds between two plain lines; the first and the last step always show.
        """
        self._console = console
        self._total_steps = total_steps
        self._interval_s = interval_s
        self._shown_s = -math.inf
        self._seen: tuple[int, float] | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._has_bar = console.width >= _WIDTH_FOR_BAR
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.fields[step]}"),
                *([BarColumn(bar_width=None)] if self._has_bar else []),
                TextColumn("{task.fields[numbers]}"),
                console=console,
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task(
                "", total=total_steps, step=f"step 0/{total_steps}", numbers=""
            )
            self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        now_s = time.monotonic()
        if self._seen is None:
            self._seen = (record.step, now_s)
        words = f"step {record.step}/{self._total_steps}"
        width = math.inf
        if self._progress is not None:
            width = self._console.width - len(words) - _GAPS - (_BAR if self._has_bar else 0)
        numbers = step_text(record, self._time_left(record.step, now_s), width)
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, step=words, numbers=numbers)
        elif (
            now_s - self._shown_s >= self._interval_s
            or record.step >= self._total_steps
            or not math.isfinite(record.loss)
        ):
            self._shown_s = now_s
            self.say(f"{words}  {numbers}")

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """End the display and leave its last state on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _time_left(self, step: int, now_s: float) -> str:
        # The first step seen is the reference: it holds the warm-up, and a resumed run begins late.
        assert self._seen is not None, "_time_left() before the first step"
        first_step, first_s = self._seen
        if step <= first_step:
            return "left --:--"
        left_s = (now_s - first_s) / (step - first_step) * max(self._total_steps - step, 0)
        return f"left {_clock(left_s)}"


class RunLog:
    """Writes the records of one run and shows them. Use it as a context, or call `close`."""

    def __init__(
        self,
        folder: Path | str,
        console: Console,
        total_steps: int,
        *,
        interval_s: float = 10.0,
        tensorboard: bool = True,
    ) -> None:
        """Open the files.

        Args:
            folder: the run's folder; it is made if it does not exist.
            console: where to show the run.
            total_steps: the number of the last step.
            interval_s: seconds between two lines on a console that is no terminal.
            tensorboard: whether to write TensorBoard scalars too, in `folder`/tensorboard.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _cut_half_line(self.folder / METRICS_FILE)
            self._file = (self.folder / METRICS_FILE).open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the run's records to {self.folder}: {error.strerror}; give another "
                "folder with --out"
            ) from None
        self._writer = _tensorboard_writer(self.folder / "tensorboard") if tensorboard else None
        self.display = LiveDisplay(console, total_steps, interval_s)

    def step(self, record: StepRecord) -> None:
        """Keep and show a step."""
        values = asdict(record)
        times = values.pop("times")
        if times is not None:
            values.update(times)
        self._write("step", values)
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name not in ("step", "tokens", "skipped"):
                    group = "time" if name.endswith("_s") and times and name in times else "train"
                    self._scalar(f"{group}/{name}", value, record.step)
        self.display.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Keep and show a measurement of the validation loss."""
        values = asdict(record)
        self._write("evaluation", values)
        words = f"validation after step {record.step}: loss {record.loss:.4f}"
        if record.bits_per_byte is not None:
            words += f", {record.bits_per_byte:.4f} bits per byte"
        self._scalar("validation/loss", record.loss, record.step)
        if record.bits_per_byte is not None:
            self._scalar("validation/bits_per_byte", record.bits_per_byte, record.step)
        self.display.say(words)

    def note(self, kind: str, values: Mapping[str, object]) -> None:
        """Keep any other record, such as the environment or the summary, as one line of JSON."""
        self._write(kind, values)

    def close(self) -> None:
        """Flush and close the files and end the display; a second call does nothing."""
        self.display.close()
        with suppress(OSError):  # each line is flushed: what could not be written has been told
            self._file.close()
        if self._writer is not None:
            if self.folder.is_dir():  # else a thread of the library would end with a traceback
                self._writer.close()
            self._writer = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)

    def _write(self, kind: str, values: Mapping[str, object]) -> None:
        if not self.folder.is_dir():  # what is open would go on there, all that is new here
            raise TrainingError(
                f"{self.folder}, the folder of this run, was moved or removed while it runs; its "
                "records and checkpoints belong together, so it ends here"
            )
        line = {"kind": kind, "time": time.time(), **values}
        try:
            self._file.write(json_text(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"cannot write the run's records to {self.folder}: {error.strerror}"
            ) from error


def step_text(record: StepRecord, left: str = "", width: float = math.inf) -> str:
    """Return the numbers of a step for people, the most important of them where all are too wide.

    Args:
        record: of the step.
        left: how long the run will go on.
        width: columns there are.
    """
    loss = f"loss {record.loss:.4f}" + ("  SKIPPED" if record.skipped else "")
    rate = f"{record.tokens_per_s:,.0f} tokens/s"
    share = "" if record.mfu is None else f"MFU {percent(record.mfu)}"
    whole_share = f"{share} of {record.mfu_of}" if share else ""
    for parts in (
        (loss, rate, whole_share, left),
        (loss, rate, share, left),
        (loss, rate, left),
        (loss, left),
    ):
        text = "  ".join(filter(None, parts))
        if len(text) <= width:
            return text
    return loss


def values_of(value: Any) -> Any:
    """Return a dataclass, or values with such in them, as plain values: its fields and properties.

    One that has an `as_dict` of its own gives that.
    """
    if is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "as_dict"):
            return cast(Any, value).as_dict()
        names = [field.name for field in fields(value)]
        names += [
            name for name, _ in inspect.getmembers(type(value), lambda m: isinstance(m, property))
        ]
        return {name: values_of(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [values_of(inner) for inner in cast("Sequence[Any]", value)]
    return value


def json_text(value: object) -> str:
    """Return one line of valid JSON; numbers that are not finite become null and a text beside."""
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def finite(value: object) -> object:
    """Return the value with every NaN and infinity in it replaced, see the top of this file."""
    if isinstance(value, Mapping):
        replaced: dict[str, object] = {}
        for name, inner in value.items():
            replaced[str(name)] = finite(inner)
            if isinstance(inner, float) and not math.isfinite(inner):
                replaced[f"{name}_text"] = str(inner)
        return replaced
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _cut_half_line(file: Path) -> None:
    """Cut off a record that a power cut left unfinished; the next would be lost in its line."""
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


def _tensorboard_writer(folder: Path) -> SummaryWriter:
    # Imported late: it takes a second that a rank without records need not spend.
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder), flush_secs=10)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
