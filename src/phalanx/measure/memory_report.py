"""The memory report at the end of a run: measured bytes next to the predicted bytes."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rich.table import Column, Table
from rich.text import Text

from phalanx.measure.memory import KINDS, Kind, MemoryAccount

_NAMES: dict[Kind, str] = {
    "gathered": "gathered parameters",
    "cast": "cast parameters",
    "communication": "communication buffers",
}


@dataclass(frozen=True, kw_only=True)
class MemoryReport(MemoryAccount):
    """The memory account of rank 0 in one step, with the peaks of all ranks and of its process.

    Attributes:
        largest_bytes: highest peak of any rank.
        resident_bytes: peak resident memory of rank 0's process, libraries and samples included.
    """

    largest_bytes: int
    resident_bytes: int

    @property
    def doubt(self) -> str | None:
        """Reason why this account is inconsistent; None if it is consistent."""
        held = self.at_end["parameters"] + self.at_end["optimizer"]
        peak = f"no memory report: the peak of {_mib(self.peak_bytes)} MiB"
        if not held <= self.peak_bytes <= self.largest_bytes:
            return (
                f"{peak} is below the {_mib(held)} MiB of parameters and optimizer state, or above "
                "the largest peak of all ranks"
            )
        if any(self.at_peak[kind] > self.at_most[kind] for kind in KINDS):
            return "no memory report: one kind has more bytes at the peak than its own maximum"
        if self.allocated_bytes is not None and self.allocated_bytes < self.peak_bytes:
            gave = _mib(self.allocated_bytes)
            return f"{peak} is more than the {gave} MiB that CUDA's allocator has allocated"
        return None

    def table(
        self,
        predicted: Mapping[str, int] = MappingProxyType({}),
        at_peak: Mapping[str, int] = MappingProxyType({}),
    ) -> Table | Text:
        """Return a table with a row for each kind in MiB, and a last row for the peak.

        Args:
            predicted: predicted peak bytes of each kind; the kinds peak at different times.
            at_peak: predicted bytes of each kind at the peak; their sum is the predicted peak.
        """
        if self.doubt is not None:
            return Text(self.doubt)
        heads = "predicted", "at most", "error", "predicted"
        table = Table(
            "what",
            *(Column(name, justify="right") for name in (*heads, "at the peak")),
            title="What rank 0 holds in a step, MiB",
            title_justify="left",
        )
        for kind in KINDS:
            most = _beside(predicted.get(kind), self.at_most[kind])
            peak = _beside(at_peak.get(kind), self.at_peak[kind])[:2]
            table.add_row(_NAMES.get(kind, kind), *most, *peak)
        table.add_section()
        *peak, error = _beside(sum(at_peak.values()) if at_peak else None, self.peak_bytes)
        table.add_row("all", "", "", error, *peak)
        return table

    def text(self) -> str:
        """Return the text below the table: peak phase, highest rank and resident memory."""
        resident = f"Rank 0's process had up to {_mib(self.resident_bytes)} MiB in RAM."
        if self.doubt is not None:
            return resident
        words = f"The peak is in {self.peak_phase}; the highest peak of any rank is "
        words += f"{_mib(self.largest_bytes)} MiB. "
        if self.allocated_bytes is not None:
            words += f"CUDA's allocator allocated {_mib(self.allocated_bytes)} MiB. "
        return words + resident


def _beside(predicted: int | None, measured: int) -> tuple[str, str, str]:
    """Return the texts of the predicted and measured MiB, and of the error in percent."""
    if predicted is None:
        return "-", _mib(measured), ""
    error = f"{100 * (predicted / measured - 1):+.1f} %" if measured else ""
    return _mib(predicted), _mib(measured), error


def resident_peak_bytes() -> int:
    """Return the peak resident bytes of this process so far, libraries included."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
