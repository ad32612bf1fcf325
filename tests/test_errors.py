"""Figures in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from phalanx.errors import (
    ConfigError,
    message_of,
    printable,
    shortened,
    system_limit_advice,
    time_text,
)

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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\u202etxt.exe", "a\\u202etxt.exe"),
        ("a\u2028b", "a\\u2028b"),
        ("a\tb\nc \u6a21\u00e9", "a\tb\nc \u6a21\u00e9"),
    ],
)
def test_nothing_steers_the_terminal_or_turns_the_order_of_the_words(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert message_of(ConfigError(text)) == shown


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_whose_text_cannot_be_read_is_no_system_limit() -> None:
    assert system_limit_advice(Mute()) == ""


def test_a_long_text_keeps_both_ends() -> None:
    assert shortened("x" * 10, 10, " ") == "x" * 10
    assert shortened("ab" + "x" * 20 + "yz", 4, " ") == "ab ... 20 characters left out ... yz"
