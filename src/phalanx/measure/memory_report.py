"""The memory report at the end of a run: measured bytes next to the predicted bytes."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.measure.memory import KINDS, Kind, MemoryAccount
from phalanx.report.tabular import Cell, Number, Part, Table
from phalanx.report.units import MIB, size_text

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
        peak = f"no memory report: the peak of {size_text(self.peak_bytes)}"
        if not held <= self.peak_bytes <= self.largest_bytes:
            return (
                f"{peak} is below the {size_text(held)} of parameters and optimizer state, or "
                "above the largest peak of all ranks"
            )
        if any(self.at_peak[kind] > self.at_most[kind] for kind in KINDS):
            return "no memory report: one kind has more bytes at the peak than its own maximum"
        if self.allocated_bytes is not None and self.allocated_bytes < self.peak_bytes:
            gave = size_text(self.allocated_bytes)
            return f"{peak} is more than the {gave} that CUDA's allocator has allocated"
        return None

    def table(
        self,
        predicted: Mapping[str, int] = MappingProxyType({}),
        at_peak: Mapping[str, int] = MappingProxyType({}),
    ) -> Part:
        """Return a table with a row for each kind in MiB, and a last row for the peak.

        Args:
            predicted: predicted peak bytes of each kind; the kinds peak at different times.
            at_peak: predicted bytes of each kind at the peak; their sum is the predicted peak.
        """
        if self.doubt is not None:
            return self.doubt

        def error(predicted: int | None, measured: int) -> float | None:
            return predicted / measured - 1 if predicted is not None and measured else None

        rows: list[Sequence[Cell]] = []
        for kind in KINDS:
            most, expected = self.at_most[kind], predicted.get(kind)
            cells = ("-" if expected is None else expected, most, error(expected, most))
            row = (_NAMES.get(kind, kind), *cells, at_peak.get(kind, "-"), self.at_peak[kind])
            rows.append(row)
        peak = sum(at_peak.values()) if at_peak else None
        whole = ("-" if peak is None else peak, self.peak_bytes)
        rows.append(("all", None, None, error(peak, self.peak_bytes), *whole))
        both = [Number(name, ".2f", MIB) for name in ("predicted", "at most")]
        peaks = [Number(name, ".2f", MIB) for name in ("predicted", "at the peak")]
        heads = ("what", *both, Number("error, %", "+.1f", 0.01), *peaks)
        return Table("What rank 0 holds in a step, MiB", heads, rows)

    def text(self) -> str:
        """Return the text below the table: peak phase, highest rank and resident memory."""
        resident = f"Rank 0's process had up to {size_text(self.resident_bytes)} in RAM."
        if self.doubt is not None:
            return resident
        words = f"The peak is in {self.peak_phase}; the highest peak of any rank is "
        words += f"{size_text(self.largest_bytes)}. "
        if self.allocated_bytes is not None:
            words += f"CUDA's allocator allocated {size_text(self.allocated_bytes)}. "
        return words + resident


def resident_peak_bytes() -> int:
    """Return the peak resident bytes of this process so far, libraries included."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
