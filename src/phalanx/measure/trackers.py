"""Trackers of a run: functions that rank 0 calls with each record, such as TensorBoard's.

kind of a record    what TensorBoard shows
config              the settings as hyperparameters
step, evaluation    train/loss, time/backward_s, validation/loss, ...
routing             routing/NAME, mean over layers, routing_entropy/layerN, routing_load/layerN
ranks               time_ranks/TERM_min, _median, _max over ranks, exposed/AXIS
memory              memory/stage0/KIND at the peak, and a picture, of each stage's first rank
summary             sent/AXIS in bytes, predicted/NAME and measured/NAME
"""

from __future__ import annotations

import os
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from phalanx.errors import CheckpointError
from phalanx.report.inline_svg import COLORS
from phalanx.report.units import size_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.tensorboard.writer import SummaryWriter

Values = Mapping[str, Any]
"""The values of a record as plain JSON types, see report/output.py."""

Tracker = Callable[[str, Values], object]
"""Called with the kind and the values of each record; `close()`, if it has one, at the end."""

FINAL: Final = ("train/loss", "train/tokens_per_s", "train/mfu", "validation/loss")
"""Curves whose last values TensorBoard shows beside the hyperparameters."""


def has_tensorboard() -> bool:
    """Return whether TensorBoard is installed (extra `tensorboard`)."""
    return find_spec("tensorboard") is not None


class TensorBoard:
    """The tracker that writes to the folder `tensorboard` of a run."""

    def __init__(self, run: Path) -> None:
        """Make the folder; the first record opens its file.

        Raises:
            CheckpointError: the folder is a link.
            OSError: the folder cannot be made.
        """
        self._folder = folder = run / "tensorboard"
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder} is a link, but records are written only to the run's own folder; move "
                "the link away, or give another folder"
            )
        folder.mkdir(exist_ok=True)
        self._session_end = self._hook_before = cast(Any, None)
        self._stages = set[int]()

    @cached_property
    def _writer(self) -> SummaryWriter:
        # Imported here because it takes a second, which ranks that write no records need not spend.
        from torch.utils.tensorboard.writer import SummaryWriter

        self._hook_before, threading.excepthook = threading.excepthook, self._on_thread_error
        return SummaryWriter(os.fspath(self._folder), flush_secs=10)

    def __call__(self, kind: str, values: Values) -> None:
        """Write a record."""
        match kind:
            case "config":
                self._add_settings(values)
            case "step":
                for name in values:
                    if name.endswith("_s") and name not in ("tokens_per_s", "exposed_s"):
                        self._add(f"time/{name}", values[name], values["step"])
                for name in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu"):
                    self._add(f"train/{name}", number(values, name), values["step"])
            case "evaluation":
                for name in values:
                    if name != "step" and not name.endswith("_text"):
                        self._add(f"validation/{name}", number(values, name), values["step"])
            case "routing":
                step = values["step"]
                for name in ("token_loss", "aux_loss", "z_loss"):
                    self._add(f"routing/{name}", number(values, name), step)
                for name, mean in values["mean"].items():
                    self._add(f"routing/{name}", mean, step)
                for layer, entropy, load in zip(
                    values["layers"], values["entropy"], values["expert_load"], strict=True
                ):
                    self._add(f"routing_entropy/layer{layer}", entropy, step)
                    self._add(f"routing_load/layer{layer}", load, step)
            case "ranks":
                for term, spread in values["spread"].items():  # one point a window
                    for name, of in zip(
                        ("min", "median", "max"), zip(*spread, strict=True), strict=True
                    ):
                        curve = f"time_ranks/{term}_{name}"
                        self._add(curve, statistics.median(of), values["steps"][-1])
                for axis, by_rank in values.get("exposed", {}).items():
                    self._add(f"exposed/{axis}", statistics.fmean(by_rank), values["steps"][-1])
            case "memory" if values["stage"] not in self._stages:
                self._stages.add(values["stage"])
                step, curves = values["step"], f"memory/stage{values['stage']}"
                held = {kind: of[values["peak"]] for kind, of in values["curve"]["bytes"].items()}
                words = ", ".join(
                    f"{kind} {size_text(each)}" for kind, each in held.items() if each
                )
                held["peak"] = sum(held.values())
                if values.get("predicted") is not None:
                    held["predicted"] = sum(values["predicted"]["at_peak"].values())
                for name, num_bytes in held.items():
                    self._add(f"{curves}/{name}", num_bytes, step)
                pixels = memory_pixels(values["curve"]["at_s"], values["curve"]["bytes"], held)
                self._writer.add_image(f"{curves}/step", pixels, step, dataformats="HWC")
                words += " at the peak, from bottom to top; the dashes are the predicted peak"
                self._writer.add_text(f"{curves}/step", words, step)
            case "summary":
                step = values["steps_done"]
                for axis, num_bytes in sent_by_axis(values).items():
                    self._add(f"sent/{axis}", num_bytes, step)
                for group, unit in (("time_s", "s"), ("bytes", "bytes")):
                    of = (values.get("predicted") or {}).get(group, {})
                    for name, forecast in of.items():
                        for kind in ("predicted", "measured"):
                            self._add(f"{kind}/{name}_{unit}", forecast[kind], step)
                if self._session_end is not None:
                    cast(Any, self._writer.file_writer).add_summary(self._session_end)
            case _:
                pass

    def _add(self, curve: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(curve, value, step)

    def _add_settings(self, settings: Values) -> None:
        """Write the settings now, so that a run that is killed has them too."""
        from torch.utils.tensorboard.summary import hparams

        # torch's `add_hparams` would open a second run beside this one.
        parts = hparams(settings_of(settings), dict.fromkeys(FINAL, 0.0))
        *begin, self._session_end = cast("tuple[Any, Any, Any]", parts)
        for part in begin:
            cast(Any, self._writer.file_writer).add_summary(part)

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Print no traceback for TensorBoard's writer thread: the next point raises its error."""
        is_its = type(args.thread).__module__.startswith("tensorboard.")
        if not (is_its and isinstance(args.exc_value, OSError)):
            self._hook_before(args)

    def close(self) -> None:
        """Flush and close the file."""
        with suppress(OSError):
            # If the folder were gone, TensorBoard's thread would print a traceback.
            if "_writer" in vars(self) and self._folder.is_dir():
                self._writer.close()
        if self._hook_before is not None:
            threading.excepthook = self._hook_before


def memory_pixels(
    at_s: Sequence[float],
    num_bytes: Mapping[str, Sequence[int]],
    held: Mapping[str, int],
    width: int = 800,
    height: int = 400,
) -> NDArray[np.uint8]:
    """Return the memory over a step as stacked areas, [height, width, RGB].

    Args:
        at_s: times of the step; bytes hold until the next time.
        num_bytes: kind -> bytes at each time.
        held: the `peak`, and the `predicted` one if known, a line of dashes.
        width: pixels of the picture.
        height: pixels of the picture.
    """
    import numpy as np

    columns = np.searchsorted(at_s, np.linspace(0, at_s[-1], width), "right") - 1
    stacked = np.array([*num_bytes.values()], float)[:, columns].cumsum(0)  # [kinds, width]
    top = 1.02 * max(1, *held.values())
    above_row = top * np.arange(height, 0, -1)[:, None] / height
    pixels = np.full((height, width, 3), 255, np.uint8)
    for kind in reversed(range(len(stacked))):  # the lower kinds over these
        pixels[above_row <= stacked[kind]] = [*bytes.fromhex(COLORS[kind % len(COLORS)][0][1:])]
    if "predicted" in held:
        pixels[int(height * (1 - held["predicted"] / top)), np.arange(width) % 12 < 8] = 0
    return pixels


def number(values: Values, name: str) -> float | None:
    """Return a value of a record, None if unknown; JSON has one that is not finite as text."""
    text = values.get(f"{name}_text")
    return values.get(name) if text is None else float(text)


def settings_of(settings: Values, prefix: str = "") -> dict[str, str | float]:
    """Return dotted key -> value of each setting that is set; values other than numbers as text."""
    flat = dict[str, str | float]()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= settings_of(cast("Values", value), f"{prefix}{name}.")
        elif value is not None and name not in ("kind", "time"):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            flat[prefix + name] = value if is_number else str(value)
    return flat


def sent_by_axis(summary: Values) -> Counter[str]:
    """Return the bytes that a rank sends in a step, by axis."""
    sent = Counter[str]()
    for entry in summary.get("sent") or ():
        sent[entry["axis"]] += entry["sent_bytes"]
    return sent
