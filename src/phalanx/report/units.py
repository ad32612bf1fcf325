"""Numbers as text, each in one unit: bytes, seconds, rates, counts and fractions."""

from __future__ import annotations

from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

ROUNDING: Final = 1e-3
"""Distance outside [0, 1] that a ratio of separately measured times may have."""


def size_text(num_bytes: float) -> str:
    """Format bytes in the largest unit in which the value is at least 1."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def time_text(seconds: float) -> str:
    """Format a time with three digits, or its whole part, in the largest unit that gives >= 1."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if (rounded := float(f"{scale * seconds:.3g}")) >= 1 or not seconds:
            return f"{scale * seconds:,.0f} {unit}" if rounded >= 100 else f"{rounded:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"


def clock_text(seconds: float) -> str:
    """Format a duration as minutes and seconds, such as 02:05, or as 1:02:05 from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def percent(share: float | None) -> str:
    """Return a fraction as text, such as `41.3 %`; `unknown` for None and outside [0, 1]."""
    if share is None or not -ROUNDING <= share <= 1 + ROUNDING:
        return "unknown"
    return "< 0.1 %" if 0 < share < 5e-4 else f"{100 * share:.1f} %"


def si(value: float, unit: str) -> str:
    """Return a value with three digits and an SI prefix, such as 24.3 EFLOP/s."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    gap = " " if " " in unit else ""
    return f"{value:.3g} {prefixes[0]}{gap}{unit}".replace("  ", " ")


def count_text(number: float) -> str:
    """Return a number of parameters with three digits, in thousands, millions (M) or billions (B).

    1 B is shown instead of 1,000 M.
    """
    for letter, size in (("B", 1e9), ("M", 1e6)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {letter}"
    return f"{number / 1e3:.3g} k"


def tera(flops_per_s: float) -> str:
    """Return a rate of operations with four digits, in TFLOP/s."""
    return f"{flops_per_s / 1e12:.4g} TFLOP/s"
