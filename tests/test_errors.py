"""Figures in words."""

from __future__ import annotations

import pytest

from phalanx.errors import (
    ConfigError,
    message_of,
    printable,
    shortened,
    system_limit_advice,
)


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
