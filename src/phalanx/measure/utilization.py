"""MFU and HFU: the fraction of a device's peak FLOP/s that a training step used.

Each is reported relative to two peaks: the vendor's data sheet (`peaks.py`), and the ceiling that
matrix products reach on the device (`products.py`). Each is counted with causal attention, and with
full attention as in the PaLM paper. A value outside [0, 1] is not given; a warning has the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.account.flops import Attention, Flops
from phalanx.measure.peaks import Peak, grade_of
from phalanx.report.units import percent, tera

Reference = Literal["data sheet", "ceiling"]

_SHARES = "MFU = model FLOPs / (time x devices x peak), HFU = (model FLOPs + recompute) / the same"
_COUNT = "model FLOPs = 6 x matmul parameters x tokens"
_OF_ACTIVE = "model FLOPs = 6 x matmul parameters that a token visits, its experts, x tokens"
_COUNTED = "model FLOPs = the count of PyTorch's FlopCounterMode for forward and backward"
_ATTENTION = (
    "12 x pairs x heads x head_dim x layers, pairs = T (T + 1) / 2 a sequence (causal) or T x T "
    "(full)"
)


class CountedFlops(NamedTuple):
    """FLOPs of one step of any module, from a count of its operators."""

    model: int
    """FLOPs of forward and backward, without recomputation."""
    recompute: int = 0
    """FLOPs of operators that run again during backward."""

    @property
    def hardware(self) -> int:
        """FLOPs executed: model FLOPs + recompute."""
        return self.model + self.recompute


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """FLOPs and time of one step, with the peaks that MFU and HFU are relative to."""

    causal: Flops | CountedFlops
    """FLOPs of the step over all devices, with causal attention (or of a counted module)."""
    full: Flops | None
    """FLOPs of the step with full attention; None for a model without attention."""
    time_s: float
    """Duration of the step."""
    num_devices: int
    """Number of devices that ran the step."""
    peak: Peak | None
    """Data-sheet peak of one device; None if the table lacks it, as for CPUs."""
    ceiling_flops_per_s: float | None
    """Rate of the best matrix product measured on one device; None if not measured."""

    @property
    def rates(self) -> dict[Reference, float]:
        """Total FLOP/s of all devices, by each known peak."""
        found: dict[Reference, float] = {}
        if self.peak is not None:
            found["data sheet"] = self.peak.flops_per_s * self.num_devices
        if self.ceiling_flops_per_s is not None:
            found["ceiling"] = self.ceiling_flops_per_s * self.num_devices
        return found

    @property
    def basis(self) -> str:
        """Text beside each MFU and HFU of a model with experts; empty for others."""
        is_of_active = isinstance(self.causal, Flops) and self.causal.is_of_active
        return " by active FLOPs" if is_of_active else ""

    @property
    def formula(self) -> str:
        """The formulas behind every MFU and HFU of this value."""
        count = _COUNTED if isinstance(self.causal, CountedFlops) else _COUNT
        count = _OF_ACTIVE if self.basis else count
        count = count if self.full is None else f"{count} + {_ATTENTION}"
        return f"{_SHARES}; {count}; 2 FLOPs a multiply-add"

    def mfu(self, of: Reference, attention: Attention = "causal") -> float | None:
        """Return model FLOPs / (time x devices x peak); None if unknown or above 1."""
        flops = self._flops(attention)
        return None if flops is None else self._share(flops.model, of)

    def hfu(self, of: Reference, attention: Attention = "causal") -> float | None:
        """Return (model FLOPs + recompute) / (time x devices x peak); None as for `mfu`."""
        flops = self._flops(attention)
        return None if flops is None else self._share(flops.hardware, of)

    def warnings(self) -> list[str]:
        """Return the cause of each HFU above 100 %, which is never shown as a number."""
        found: list[str] = []
        achieved = self.causal.hardware / self.time_s
        claimed = 0.0 if self.full is None else self.full.hardware / self.time_s
        for of, rate in self.rates.items():
            if achieved > rate and of == "ceiling":
                found.append(
                    f"the ceiling is stale: the step reached {tera(achieved)}, but the ceiling "
                    f"was measured at only {tera(rate)}; measure again with `phalanx bench "
                    "ceiling` on an idle machine"
                )
            elif achieved > rate:
                found.append(
                    f"the step seems to reach {tera(achieved)}, more than the {tera(rate)} of "
                    "the data sheet: the time or the number of devices is wrong"
                )
            elif claimed > rate:
                found.append(
                    f"counted with full attention, the step would reach {tera(claimed)}, above "
                    f"the {of} of {tera(rate)}: that count includes products that the step "
                    "skipped, so this MFU is not shown"
                )
        return found

    def brief(self) -> str | None:
        """Return the causal MFU as one line, with a grade for the data sheet; None if unknown."""
        for of, rate in self.rates.items():
            if (share := self.mfu(of)) is not None:
                devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
                words = f"{percent(share)} of the {of}{self.basis} ({tera(rate)} for {devices})"
                return words + (f"; {grade_of(share)}" if of == "data sheet" else "")
        return None

    def text(self) -> str:
        """Return one line for each peak, the formula, and any warning."""
        lines: list[str] = []
        for of, rate in self.rates.items():
            source = f", {self.peak.source}" if of == "data sheet" and self.peak else ""
            words = f"MFU {percent(self.mfu(of))}, HFU {percent(self.hfu(of))}"
            if self.full is not None:
                full = f"MFU {percent(self.mfu(of, 'full'))}, HFU {percent(self.hfu(of, 'full'))}"
                words += f" (causal); {full} (full attention)"
            lines.append(f"{words}{self.basis} of the {of} ({tera(rate)}{source})")
        if (share := self.mfu("data sheet")) is not None:
            lines.append(f"The MFU is {grade_of(share)}.")
        if not lines:
            lines.append("no MFU: this device has neither a data sheet nor a measured ceiling")
        lines.append(f"{self.rate_text()} of model FLOPs; {self.formula}")
        return "\n".join(lines + [f"WARNING: {warning}" for warning in self.warnings()])

    def rate_text(self) -> str:
        """Return the rate of model FLOPs as text; `unknown` if it exceeds the data sheet."""
        rate = self.causal.model / self.time_s
        return "unknown" if rate > self.rates.get("data sheet", rate) else tera(rate)

    def as_dict(self) -> dict[str, object]:
        """Return every MFU, HFU, rate and count as plain values for JSON."""
        return {
            "formula": self.formula,
            "is_of_active": bool(self.basis),
            "time_s": self.time_s,
            "num_devices": self.num_devices,
            "model_flops_causal": self.causal.model,
            "model_flops_full": None if self.full is None else self.full.model,
            "recompute_flops": self.causal.recompute,
            "model_flops_per_s": self.causal.model / self.time_s,
            "data_sheet_flops_per_s": None if self.peak is None else self.peak.flops_per_s,
            "data_sheet_source": None if self.peak is None else self.peak.source,
            "ceiling_flops_per_s": self.ceiling_flops_per_s,
            **{
                f"{kind}_{of.replace(' ', '_')}_{attention}": share(of, attention)
                for kind, share in (("mfu", self.mfu), ("hfu", self.hfu))
                for of in ("data sheet", "ceiling")
                for attention in ("causal", "full")
            },
            "warnings": self.warnings(),
        }

    def _flops(self, attention: Attention) -> Flops | CountedFlops | None:
        return self.causal if attention == "causal" else self.full

    def _share(self, flops: int, of: Reference) -> float | None:
        share = flops / self.time_s / self.rates.get(of, math.nan)
        return share if 0 <= share <= 1 else None  # NaN, without a peak, gives None
