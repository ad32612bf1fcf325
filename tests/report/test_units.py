"""Figures in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from phalanx.report.units import time_text

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.5e-7, "0.25 us"),
        (0.00099949, "999 us"),
        (0.0009996, "1 ms"),
        (0.0123456, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.234, "1.23 s"),
        (99.96, "100 s"),
        (1499.6, "1,500 s"),
        (123_456.0, "123,456 s"),
    ],
)
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@given(some.floats(1e-6, 1e9))
def test_no_time_has_an_exponent(seconds: float) -> None:
    number, unit = time_text(seconds).split()
    assert "e" not in number
    assert float(number.replace(",", "")) * SECONDS[unit] == pytest.approx(seconds, rel=0.0051)
