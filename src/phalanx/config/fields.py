"""The settings of any dataclass: their types, their ranges, and what each is for.

A field says all of it beside its type: `steps: Annotated[int | None, Use.RESOLVED, Range(1)]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from phalanx.errors import ConfigError, nearest

Schema = TypeVar("Schema")


@dataclass(frozen=True)
class Range:
    """The legal interval of a number; an open end at infinity means finite.

    The brackets say whether its ends belong to it: "[)" is closed below and open above.
    """

    low: float
    high: float = math.inf
    ends: str = "[)"


THREADS: Final = Range(1, 2**12, "[]")
"""CPU threads of a process, as every way of starting one takes them."""

TIMEOUT_S: Final = Range(0, 10**6, "(]")
"""Seconds that one process waits for another."""

MINUTES: Final = Range(0, 10**6, "[]")
"""Minutes between two checkpoints."""

STEPS: Final = Range(1, 2**40, "[]")
"""Optimizer steps of a run."""

MOST_WHOLE: Final = 2**63 - 1
"""Largest whole number of a setting without a bound of its own, as torch takes sizes and seeds."""

SEED: Final = Range(0, MOST_WHOLE, "[]")
"""What generators are seeded with."""


@dataclass(frozen=True)
class OneOf:
    """The legal values of a number, where they are few; the last is said after "or"."""

    values: tuple[float, ...]


class Positional(str):
    """What --help calls a setting that the command line gives without its name."""


class Use(Flag):
    """What a setting of a run is for: one of the first five, and more as it applies."""

    LAW = auto()
    """All hosts must have the same, and a resumed run says so if it has another."""
    STREAM = auto()
    """It fixes the order of the samples: a resumed run cannot take another."""
    RESOLVED = auto()
    """What it comes to is compared instead, such as the strategy or the tokenizer's digest."""
    LOCAL = auto()
    """Each host, and each part of a run, has its own."""
    PATH = auto()
    """The same, of a file: the kept value holds from any folder."""
    UNKEPT = auto()
    """A run does not keep it: it is about one start of the run, or follows from kept values."""
    FRESH = auto()
    """A resumed run does not take it from its file: the checkpoint has what it led to."""
    OF_TOKENIZER = auto()
    """Nor this, where the tokenizer that it led to stands beside the file."""


@dataclass(frozen=True)
class Setting:
    """One value of a configuration.

    Attributes:
        key: its name, dotted inside a section.
        hint: its type, without what stands beside it.
        range: the legal values of a number; None for all others.
        use: what it is for.
        positional: set for one that the command line gives without its name.
    """

    key: str
    hint: Any
    range: Range | OneOf | None
    use: Use
    positional: Positional | None


@functools.cache
def settings(schema: type, prefix: str = "") -> tuple[Setting, ...]:
    """Return each value of a configuration: its own, inherited ones, and sections, as written."""
    hints = typing.get_type_hints(schema, include_extras=True)
    written = dict.fromkeys(
        name for each in schema.__mro__ for name in inspect.get_annotations(each)
    )
    found: list[Setting] = []
    names = sorted((field.name for field in fields(schema)), key=list(written).index)
    for name in sorted(names, key=lambda name: is_dataclass(hints[name])):
        hint, about = hints[name], ()
        if typing.get_origin(hint) is Annotated:
            hint, *about = typing.get_args(hint)
        if is_dataclass(hint):
            found += settings(cast(type, hint), f"{prefix}{name}.")
            continue
        legal = next((each for each in about if isinstance(each, Range | OneOf)), None)
        use = next((each for each in about if isinstance(each, Use)), Use(0))
        positional = next((each for each in about if isinstance(each, Positional)), None)
        found.append(Setting(f"{prefix}{name}", hint, legal, use, positional))
    return tuple(found)


def keys_for(schema: type, use: Use) -> list[str]:
    """Return the keys of the settings that are for any of these uses."""
    return [setting.key for setting in settings(schema) if setting.use & use]


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    return operator.attrgetter(key)(config)


def with_value(config: Schema, key: str, value: Any) -> Schema:
    """Return the configuration with the value of one dotted key replaced."""
    name, _, rest = key.partition(".")
    if rest:
        value = with_value(getattr(config, name), rest, value)
    return cast(Schema, dataclasses.replace(cast(Any, config), **{name: value}))


def check_values(config: Any) -> None:
    """Refuse a value that is not of its type or out of its range."""
    for setting in settings(type(config)):
        check_value(setting, value_at(config, setting.key))


def check_value(setting: Setting, value: Any) -> None:
    """Raise ConfigError unless the value alone is one that its setting may have."""
    check_type(setting.key, setting.hint, value)
    if setting.range is not None and not (value is None or isinstance(value, str)):
        _check_range(setting.key, setting.range, value, is_whole=float not in members(setting.hint))
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(
                f"{setting.key} is empty, such as a variable of the shell that is not set; give it "
                "a value, or leave it out"
            )
        check_utf8(setting.key, value)
        if "\0" in value:
            raise ConfigError(f"{setting.key} is {value!r}; expected text without the NUL in it")


def check_utf8(key: str, value: str) -> None:
    """Refuse a text that no file of settings can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{key} is {value!r}, which is not UTF-8, so that no record of the run could name it; "
            "give it a name in UTF-8, by a link, say"
        ) from None


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself as the only one."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def choices(hint: Any) -> list[str]:
    """Return the words that a Literal allows; none for any other type."""
    return [
        word
        for member in members(hint)
        if typing.get_origin(member) is Literal
        for word in typing.get_args(member)
    ]


def check_type(key: str, hint: Any, value: Any) -> None:
    """Refuse a value that is not of the type of its key."""
    if any(_fits(member, value) for member in members(hint)):
        return
    near = ""
    if isinstance(value, str):
        near = nearest(value, choices(hint))
    elif isinstance(value, float) and int in members(hint) and abs(value) <= MOST_WHOLE:
        near = f", of which {round(value)} is the nearest"
    elif isinstance(value, int) and not isinstance(value, bool) and float in members(hint):
        near = f" of at most {sys.float_info.max:g}"
    raise ConfigError(f"{key} is {_shown(value)}; expected {describe(hint)}{near}")


def _shown(value: object) -> str:
    """Return a value as Python writes it; of a number with too many digits for that, words."""
    try:
        return repr(value)
    except ValueError:
        return "a whole number of thousands of digits"


def _fits(member: Any, value: Any) -> bool:
    """Return whether the value is of this type; a whole number is a number, true is not."""
    if typing.get_origin(member) is Literal:
        return value in typing.get_args(member)
    if (several := typing.get_origin(member)) in (tuple, list):
        return isinstance(value, several) and all(isinstance(each, str) for each in value)
    if typing.get_origin(member) is Mapping:
        entries = cast("Mapping[Any, Any]", value).items() if isinstance(value, Mapping) else ()
        is_text = all(isinstance(word, str) for entry in entries for word in entry)
        return isinstance(value, Mapping) and is_text
    if typing.get_origin(member) is Callable:
        return callable(value)
    if isinstance(value, bool):
        return member is bool
    if member is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, member)


def describe(hint: Any) -> str:
    """Return what a value of this type is, in words."""
    legal = choices(hint)
    if len(legal) > 1:
        return f"one of {', '.join(legal)}"
    words: dict[Any, str] = {
        **{int: "a whole number", float: "a number", bool: "true or false", str: "text"},
        **{tuple: "texts", list: "texts", Mapping: "texts by text"},
        **{Path: "a path", Callable: "a function"},
    }
    kinds = [typing.get_origin(m) or m for m in members(hint) if m is not type(None)]
    return " or ".join([words[kind] for kind in kinds if kind is not Literal] + legal)


def read_text(hint: Any, text: str) -> Any:
    """Return the value that `text` from a command line stands for.

    Raises:
        ConfigError: says what was expected.
    """
    types_ = members(hint)
    if type(None) in types_ and text.lower() == "none":
        return None
    if bool in types_ and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in choices(hint):
        return text
    for type_ in (int, float, str):
        if type_ in types_:
            with contextlib.suppress(ValueError):
                return type_(text)
    raise ConfigError(f"{text!r}; expected {describe(hint)}{nearest(text, choices(hint))}")


def _check_range(key: str, legal: Range | OneOf, value: float, *, is_whole: bool) -> None:
    """Raise ConfigError unless the number is one of its values, or lies in its interval."""
    if isinstance(legal, OneOf):
        if value not in legal.values:
            *most, last = (f"{each:g}" for each in legal.values)
            near = min(legal.values, key=lambda each: abs(each - value))
            raise ConfigError(
                f"{key} is {value:g}; expected {', '.join(most)} or {last}, of which {near:g} is "
                "the nearest"
            )
        return
    low, high, ends = legal.low, legal.high, legal.ends
    if is_whole and math.isinf(high):
        high, ends = MOST_WHOLE, f"{ends[0]}]"
    above = value > low or (value == low and ends[0] == "[")
    below = value < high or (value == high and ends[1] == "]")
    if above and below:  # false for nan
        return
    if math.isinf(high) or (high > 1 and not above):
        expected = f"{'at least' if ends[0] == '[' else 'more than'} {low}"
        expected += " and finite" if above else ""
    else:
        expected = f"a number in {ends[0]}{low}, {high}{ends[1]}"
    if isinstance(value, float) and math.isnan(value):
        pass  # no number is near
    elif not above and ends[0] == "[":
        expected += f"; the nearest is {low}"
    elif not below and ends[1] == "]":
        expected += f"; the nearest is {high}"
    raise ConfigError(f"{key} is {_shown(value)}; expected {expected}")
