"""Settings as the fields of a dataclass: types, legal values, and how a resumed run treats each.

A field declares them in its annotation: `steps: Annotated[int | None, Use.RESOLVED, Range(1)]`.
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
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, cast

from phalanx.errors import ConfigError, nearest

Schema = TypeVar("Schema")


@dataclass(frozen=True)
class Range:
    """The legal interval of a number; an open end at infinity excludes infinity.

    `ends` has the brackets of the interval: "[)" is closed below and open above.
    """

    low: float
    high: float = math.inf
    ends: str = "[)"


THREADS: Final = Range(1, 2**12, "[]")
"""Legal number of CPU threads of a process."""

TIMEOUT_S: Final = Range(0, 10**6, "(]")
"""Legal timeout of one process that waits for another, in seconds."""

STEPS: Final = Range(1, 2**40, "[]")
"""Legal number of optimizer steps of a run."""

MAX_INT64: Final = 2**63 - 1
"""Largest integer of a setting without an upper bound: torch has int64 sizes and seeds."""

SEED: Final = Range(0, MAX_INT64, "[]")
"""Legal seed of a random generator."""


@dataclass(frozen=True)
class OneOf:
    """The legal values of a number that has only a few."""

    values: tuple[float, ...]


class Positional(str):
    """The name by which --help lists a positional setting."""


class Use(Flag):
    """How hosts and resumed runs treat a setting: one of the first five flags, plus any others."""

    EQUAL = auto()
    """All hosts must have equal values; a resumed run reports a changed value."""
    DATA_ORDER = auto()
    """Determines the order of the samples: a resumed run cannot change it."""
    RESOLVED = auto()
    """The resolved value is compared instead, such as the strategy or the tokenizer's digest."""
    LOCAL = auto()
    """May differ between hosts, and between a run and its resume, without a report."""
    PATH = auto()
    """Like LOCAL, for a path: stored as an absolute path, so that any working folder can resume."""
    NOT_SAVED = auto()
    """Not stored by a run: applies to one start of the run, or follows from stored values."""
    NOT_RESUMED = auto()
    """Not read from the run's file on a resume, because the checkpoint contains its effect."""
    FIXED_BY_TOKENIZER = auto()
    """Like NOT_RESUMED, if the run folder has the tokenizer.json that this setting resulted in."""


@dataclass(frozen=True)
class Setting:
    """One value of a configuration.

    Attributes:
        key: dotted name, with the section if it has one.
        hint: type, without the metadata of `Annotated`.
        range: legal values of a number; None if there is no limit.
        use: how hosts and resumed runs treat the setting.
        positional: name in --help of a positional setting; None for an option.
        form: class whose values the setting has as texts; None for any other.
    """

    key: str
    hint: Any
    range: Range | OneOf | None
    use: Use
    positional: Positional | None
    form: type[Parts] | None


@functools.cache
def settings(schema: type, prefix: str = "") -> tuple[Setting, ...]:
    """Return all settings of a schema: own fields, inherited fields, sections, in source order."""
    hints = typing.get_type_hints(schema, include_extras=True)
    written = dict.fromkeys(
        name for each in schema.__mro__ for name in inspect.get_annotations(each)
    )
    listed: list[Setting] = []
    names = sorted((field.name for field in fields(schema)), key=list(written).index)
    for name in sorted(names, key=lambda name: is_dataclass(hints[name])):
        hint, about = hints[name], ()
        if typing.get_origin(hint) is Annotated:
            hint, *about = typing.get_args(hint)
        if is_dataclass(hint):
            listed += settings(cast(type, hint), f"{prefix}{name}.")
            continue
        legal = next((each for each in about if isinstance(each, Range | OneOf)), None)
        use = next((each for each in about if isinstance(each, Use)), Use(0))
        positional = next((each for each in about if isinstance(each, Positional)), None)
        form = next((each for each in about if isinstance(each, type)), None)
        listed.append(Setting(f"{prefix}{name}", hint, legal, use, positional, form))
    return tuple(listed)


def keys_for(schema: type, use: Use) -> list[str]:
    """Return the keys of the settings that have any flag of `use`."""
    return [setting.key for setting in settings(schema) if setting.use & use]


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    return operator.attrgetter(key)(config)


def with_value(config: Schema, key: str, value: Any) -> Schema:
    """Return a copy of the configuration with another value of one dotted key."""
    name, _, rest = key.partition(".")
    if rest:
        value = with_value(getattr(config, name), rest, value)
    return cast(Schema, dataclasses.replace(cast(Any, config), **{name: value}))


def check_values(config: Any) -> None:
    """Raise ConfigError if any value has a wrong type or is out of range."""
    for setting in settings(type(config)):
        check_value(setting, value_at(config, setting.key))


def check_value(setting: Setting, value: Any) -> None:
    """Raise ConfigError if a value is illegal for its setting, whatever the other settings are."""
    check_type(setting.key, setting.hint, value)
    if setting.range is not None and not (value is None or isinstance(value, str)):
        _check_range(setting.key, setting.range, value, is_whole=float not in members(setting.hint))
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(
                f"{setting.key} is empty, perhaps because a shell variable is not set; give it a "
                "value, or leave it out"
            )
        check_utf8(setting.key, value)
        if "\0" in value:
            raise ConfigError(f"{setting.key} is {value!r}; expected text without NUL characters")
        if setting.form is not None:
            setting.form.parse(value)


class Parts:
    """Base of a dataclass whose text form names its fields, in any order: `wait=1,active=2`."""

    KEY: ClassVar[str]
    """Setting that has such texts, for messages."""

    @classmethod
    def parse(cls, text: str, preset: Self | None = None) -> Self:
        """Return the value of a text; `preset` or defaults have the fields that it leaves out.

        Raises:
            ConfigError: a part is not NAME=VALUE with a known name and a legal value, or there is
                none for a field without a default.
        """
        known = {setting.key: setting for setting in settings(cls)}
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, has_value, value = (word.strip() for word in part.partition("="))
            if not has_value or name not in known or name in values:
                twice = f", but {name} is set before" if name in values else ""
                near = "" if name in known else nearest(name, list(known))
                raise ConfigError(
                    f"{cls.KEY}: '{part}' in '{text}'{twice}; expected NAME=VALUE once for each "
                    f"name, with a name of {', '.join(known)}{near}"
                )
            try:
                values[name] = read_text(name, known[name].hint, value)
                check_value(known[name], values[name])
            except ConfigError as error:
                raise ConfigError(f"{cls.KEY}: {error}") from None
        values = ({} if preset is None else vars(preset)) | values
        needed = [f.name for f in fields(cast(Any, cls)) if f.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in values]:
            raise ConfigError(
                f"{cls.KEY} is {text!r}; expected also {' and '.join(missing)}, without default"
            )
        return cls(**values)


def check_utf8(key: str, value: str) -> None:
    """Raise ConfigError if a text is not UTF-8, so that no settings file can store it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{key} is {value!r}, which is not UTF-8, so no record of the run could contain it; "
            "give a name in UTF-8, for example by a link"
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
    """Raise ConfigError if a value does not have the type `hint`."""
    if any(_fits(member, value) for member in members(hint)):
        return
    near = ""
    if isinstance(value, str):
        near = nearest(value, choices(hint))
    elif isinstance(value, float) and int in members(hint) and abs(value) <= MAX_INT64:
        near = f"; the nearest is {round(value)}"
    elif isinstance(value, int) and not isinstance(value, bool) and float in members(hint):
        near = f" of at most {sys.float_info.max:g}"
    raise ConfigError(f"{key} is {_shown(value)}; expected {describe(hint)}{near}")


def _shown(value: object) -> str:
    """Return the repr of a value, or words for an integer with too many digits for repr."""
    try:
        return repr(value)
    except ValueError:
        return "a whole number of thousands of digits"


def _fits(member: Any, value: Any) -> bool:
    """Return whether the value has this type; an int counts as a float, a bool does not."""
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
    """Return a description of the type for error messages."""
    legal = choices(hint)
    if len(legal) > 1:
        return f"one of {', '.join(legal)}"
    nouns: dict[Any, str] = {
        **{int: "a whole number", float: "a number", bool: "true or false", str: "text"},
        **{tuple: "texts", list: "texts", Mapping: "texts by text"},
        **{Path: "a path", Callable: "a function"},
    }
    kinds = [typing.get_origin(m) or m for m in members(hint) if m is not type(None)]
    return " or ".join([nouns[kind] for kind in kinds if kind is not Literal] + legal)


def read_text(key: str, hint: Any, text: str) -> Any:
    """Convert the text of a setting from the command line to a value of the type `hint`.

    Raises:
        ConfigError: the text stands for no value of this type.
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
    near = nearest(text, choices(hint))
    raise ConfigError(f"{key} is {text!r}; expected {describe(hint)}{near}")


def _check_range(key: str, legal: Range | OneOf, value: float, *, is_whole: bool) -> None:
    """Raise ConfigError if the number is not a legal value, or is outside its interval."""
    if isinstance(legal, OneOf):
        if value not in legal.values:
            *most, last = (f"{each:g}" for each in legal.values)
            near = min(legal.values, key=lambda each: abs(each - value))
            raise ConfigError(
                f"{key} is {value:g}; expected {', '.join(most)} or {last}; the nearest is {near:g}"
            )
        return
    low, high, ends = legal.low, legal.high, legal.ends
    # An integer without an upper bound still has to fit torch's int64.
    if is_whole and math.isinf(high):
        high, ends = MAX_INT64, f"{ends[0]}]"
    above = value > low or (value == low and ends[0] == "[")
    below = value < high or (value == high and ends[1] == "]")
    if above and below:  # false for nan
        return
    # What was expected is said by the end that failed: "at least 1" for 0 in [1, 4096], and the
    # whole interval for a fraction or for a number that is too large.
    if math.isinf(high) or (high > 1 and not above):
        expected = f"{'at least' if ends[0] == '[' else 'more than'} {low}"
        expected += " and finite" if above else ""
    else:
        expected = f"a number in {ends[0]}{low}, {high}{ends[1]}"
    if isinstance(value, float) and math.isnan(value):
        pass  # no number is nearest to nan
    elif not above and ends[0] == "[":
        expected += f"; the nearest is {low}"
    elif not below and ends[1] == "]":
        expected += f"; the nearest is {high}"
    raise ConfigError(f"{key} is {_shown(value)}; expected {expected}")
