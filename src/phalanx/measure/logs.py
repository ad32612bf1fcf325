"""Logs of a run: metrics.jsonl, trackers and the console, all from the same values.

One process writes the logs of the whole run. `metrics.jsonl` is flushed at every line, so that a
run that stops early keeps all its records; a resumed run appends to the same file.

    write error of metrics.jsonl    ends the run: its records are gone
    exception of a tracker          ends the tracker, in one line: metrics.jsonl has the records
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from phalanx.errors import TrainingError
from phalanx.measure.expert_load import Routing
from phalanx.measure.rank_times import RankWindow
from phalanx.measure.timer import StepTimes
from phalanx.measure.trackers import TensorBoard, Tracker, has_tensorboard
from phalanx.report.output import OTHER_FOLDER, json_text, values_of, writing
from phalanx.report.terminal import Progress, Terminal
from phalanx.report.units import percent
from phalanx.storage import open_to_append

METRICS_FILE = "metrics.jsonl"

TENSORBOARD_EXTRA = "pip install 'phalanx-train[tensorboard]'"

LINES_S = 10.0
"""Least seconds between lines without a progress bar; the first and last step always print."""


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
    experts: str = ""
    """Display text of the latest recorded routing; empty without experts."""


class LiveDisplay(Progress):
    """The display of a run: a progress bar on a terminal, else occasional plain lines."""

    def __init__(self, terminal: Terminal, total_steps: int) -> None:
        super().__init__(terminal, keeps=True)
        self._total_steps = total_steps
        self._shown_s = -math.inf
        self.draw(f"step 0/{total_steps}", "", 0, total_steps)

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        now_s, total = time.monotonic(), self._total_steps
        head = f"step {record.step}/{total}"
        text = step_text(record, self.left(record.step, total), self.room(head))
        self.draw(head, text, record.step, total)
        is_due = now_s - self._shown_s >= LINES_S or record.step >= total
        if not self.has_bar and (is_due or not math.isfinite(record.loss)):
            self._shown_s = now_s
            self.terminal.say(f"{head}  {text}")


class RunLog:
    """A writer and display of the records of one run; a context manager, or call `close`."""

    def __init__(
        self,
        folder: Path,
        terminal: Terminal,
        total_steps: int,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Open the log files; create the run's folder if it does not exist.

        Each of `trackers`, and TensorBoard's if it is installed, receives each record.

        Raises:
            ConfigError: the folder cannot be written.
            CheckpointError: a record would be written through a link to a place outside `folder`.
        """
        self.folder = folder
        self._trackers = [*trackers]
        with writing(folder, OTHER_FOLDER):
            folder.mkdir(parents=True, exist_ok=True)
            # Said where curves end, and in the first run of a folder of runs, but not in each run.
            is_said = (folder / "tensorboard").exists() or not any(folder.parent.glob("*/metrics*"))
            if has_tensorboard():
                self._trackers.append(TensorBoard(folder))
            self._file = open_to_append(folder / METRICS_FILE)
            _cut_half_line(folder / METRICS_FILE)
        self.display = LiveDisplay(terminal, total_steps)
        if is_said and not has_tensorboard():
            terminal.say(f"{METRICS_FILE} has all records; for curves, {TENSORBOARD_EXTRA}")

    def step(self, record: StepRecord) -> None:
        """Write and display the record of a step."""
        values = {**vars(record)}
        del values["times"], values["experts"]
        terms_s = {f"{term}_s": seconds for term, seconds in record.times.terms_s.items()}
        terms_s["wall_s"] = record.times.wall_s
        self.note("step", values | terms_s | {"exposed_s": record.times.exposed_s})
        self.display.step(record)

    def routing(self, step: int, loss: float, routing: Routing) -> None:
        """Write the load of each expert in `step`; the loss without the auxiliary ones is apart."""
        token_loss = loss - routing.aux_loss - routing.z_loss
        means = routing.means()
        self.note(
            "routing", {"step": step, "token_loss": token_loss, **vars(routing), "mean": means}
        )

    def ranks(self, window: RankWindow) -> None:
        """Write the times of several steps on every rank."""
        self.note("ranks", vars(window))

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Write and display the validation loss after `step`, and further metrics."""
        values = {"loss": loss, **metrics}
        self.note("evaluation", {"step": step, **values})
        words = [f"loss {loss:.4f}"]
        for name, value in metrics.items():
            is_unit = name == "bits_per_byte"
            words.append(f"{value:.4f} bits per byte" if is_unit else f"{name} {value:.4f}")
        self.display.terminal.say(f"validation after step {step}: {', '.join(words)}")

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
            name = self.folder / METRICS_FILE
            unwritten = TrainingError(f"cannot write {name}: {error.strerror}")
            unwritten.exit_code = 2  # as when a checkpoint does not fit on a full disk
            raise unwritten from error
        for tracker in [*self._trackers]:
            try:
                tracker(kind, values_of(values))
            except Exception as error:
                self._close(tracker)
                name = getattr(tracker, "__qualname__", type(tracker).__name__)
                self.display.terminal.say(
                    f"{name} gets no more records, because it raised "
                    f"{type(error).__name__}: {error}; {METRICS_FILE} gets all",
                    "yellow",
                )

    def close(self) -> None:
        """Flush and close the files and end the display."""
        self.display.close()
        with suppress(OSError):  # each line was flushed, and raised its own write error
            self._file.close()
        for tracker in [*self._trackers]:
            self._close(tracker)

    def _close(self, tracker: Tracker) -> None:
        self._trackers.remove(tracker)
        if hasattr(tracker, "close"):
            with suppress(Exception):  # it may have failed since its last record
                cast(Any, tracker).close()

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
        (loss, rate, share_of, record.experts, left),
        (loss, rate, share, record.experts, left),
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
