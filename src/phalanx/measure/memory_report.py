"""The memory account of a run: what was measured, beside what the formulas say, for its end."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from phalanx.measure.memory import KINDS, Kind, MemoryAccount
from phalanx.parallel.split import StateBytes

_NAMES: dict[Kind, str] = {
    "gathered": "gathered parameters",
    "cast": "cast parameters",
    "communication": "communication buffers",
}


@dataclass(frozen=True)
class MemoryReport:
    """What a rank holds in one step.

    Attributes:
        account: what was measured on rank 0.
        predicted: bytes of each kind that a formula is known for, each at its most.
        largest_bytes: the highest peak of any rank.
        resident_bytes: the most that rank 0's process has had in RAM, libraries, samples and all.
    """

    account: MemoryAccount
    predicted: dict[Kind, int]
    largest_bytes: int
    resident_bytes: int

    def doubt(self) -> str | None:
        """Say why this account cannot be true; None if it can."""
        account = self.account
        held = sum(account.at_end[kind] for kind in ("parameters", "optimizer"))
        if not held <= account.peak_bytes <= self.largest_bytes:
            return (
                f"no account is given: its peak of {_mib(account.peak_bytes)} MiB is below the "
                f"{_mib(held)} MiB held all along, or above the largest of all ranks"
            )
        if any(account.at_peak[kind] > account.at_most[kind] for kind in KINDS):
            return "no account is given: at the peak it has more of one kind than ever"
        if account.allocated_bytes is not None and account.allocated_bytes < account.peak_bytes:
            return (
                f"no account is given: its peak of {_mib(account.peak_bytes)} MiB is more than "
                f"the {_mib(account.allocated_bytes)} MiB that CUDA's allocator gave out"
            )
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, in bytes."""
        return {
            "predicted": self.predicted,
            **asdict(self.account),
            "peak_bytes": self.account.peak_bytes,
            "largest_bytes": self.largest_bytes,
            "resident_bytes": self.resident_bytes,
            "doubt": self.doubt(),
        }

    def table(self) -> Table | Text:
        """Draw a row for each kind, in MiB."""
        if doubt := self.doubt():
            return Text(doubt)
        table = Table(title="What rank 0 holds in a step, MiB", title_justify="left")
        table.add_column("what")
        for name in ("predicted", "at most", "at the peak"):
            table.add_column(name, justify="right")
        for kind in KINDS:
            predicted = self.predicted.get(kind)
            table.add_row(
                _NAMES.get(kind, kind),
                "-" if predicted is None else _mib(predicted),
                _mib(self.account.at_most[kind]),
                _mib(self.account.at_peak[kind]),
            )
        table.add_section()
        table.add_row("all", "", "", _mib(self.account.peak_bytes))
        return table

    def text(self) -> str:
        """Return what goes with the table, in a line or two."""
        account = self.account
        if self.doubt():
            return f"Rank 0's process had up to {_mib(self.resident_bytes)} MiB in RAM."
        words = f"The peak lies in {account.peak_phase}; the highest of any rank is "
        words += f"{_mib(self.largest_bytes)} MiB. "
        if account.allocated_bytes is not None:
            words += f"CUDA's allocator gave out {_mib(account.allocated_bytes)} MiB. "
        return words + f"Rank 0's process had up to {_mib(self.resident_bytes)} MiB in RAM."


def predicted_bytes(held: StateBytes) -> dict[Kind, int]:
    """Return what the layout of a strategy says, by kind."""
    return {
        "parameters": held.parameter_bytes,
        "gathered": held.gathered_bytes,
        "gradients": held.gradient_bytes + held.unreduced_bytes,
        "optimizer": held.optimizer_bytes,
    }


def resident_peak_bytes() -> int:
    """Return the most memory that this process has had in RAM so far, all libraries included."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
