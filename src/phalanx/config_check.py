"""What a legal configuration is: the type of each value, its range, and what contradicts what.

Only what can be judged without data, devices or a model is judged here.
"""

from __future__ import annotations

import contextlib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final, Literal

from phalanx.config import MOST_ROWS, TrainConfig
from phalanx.errors import ConfigError, nearest
from phalanx.strategy import Strategy, check_ranks, require_built

Interval = tuple[float, float, str]
"""(lowest, highest, brackets): "[)" is closed below and open above."""

RANGES: Final[Mapping[str, Interval]] = {
    "nproc": (1, math.inf, "[)"),
    "steps": (1, 2**40, "[]"),
    "epochs": (0, 10**9, "(]"),
    "seed": (0, 2**63 - 1, "[]"),
    "threads": (1, 2**12, "[]"),
    "eval_every": (0, math.inf, "[)"),
    "eval_samples": (1, math.inf, "[)"),
    "save_every": (0, math.inf, "[)"),
    "save_every_minutes": (0, 10**6, "[]"),
    "keep_checkpoints": (1, math.inf, "[)"),
    "timeout_s": (0, 10**6, "(]"),
    "shape.num_layers": (1, 10_000, "[]"),
    "shape.hidden": (1, math.inf, "[)"),
    "shape.num_heads": (1, math.inf, "[)"),
    "shape.num_kv_heads": (1, math.inf, "[)"),
    "shape.head_dim": (1, math.inf, "[)"),
    "shape.ffn": (1, math.inf, "[)"),
    "shape.vocab_size": (1, math.inf, "[)"),
    "shape.max_seq_len": (1, math.inf, "[)"),
    "shape.dropout": (0, 1, "[)"),
    "corpus.seq_len": (2, math.inf, "[)"),
    "corpus.vocab_size": (257, math.inf, "[)"),  # the 256 bytes and the end of a document
    "corpus.validation": (0, 1, "[)"),
    "corpus.max_bytes": (1, math.inf, "[)"),
    "batch.global_size": (1, math.inf, "[)"),
    "batch.microbatch": (1, MOST_ROWS, "[]"),
    "batch.accumulation": (1, MOST_ROWS, "[]"),
    "optimizer.lr": (0, math.inf, "()"),
    "optimizer.min_lr_ratio": (0, 1, "[]"),
    "optimizer.warmup_steps": (0, math.inf, "[)"),
    "optimizer.beta1": (0, 1, "[)"),
    "optimizer.beta2": (0, 1, "[)"),
    "optimizer.eps": (0, math.inf, "()"),
    "optimizer.weight_decay": (0, math.inf, "[)"),
    "optimizer.clip_norm": (0, math.inf, "[)"),
}
"""The legal interval of each number. An open end at infinity means finite."""


def settings(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, type, default) of each value of a configuration, in the order written."""
    hints = typing.get_type_hints(schema)
    for field in fields(schema):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings(hint, f"{prefix}{field.name}.")
        else:
            default = field.default
            if default is MISSING and field.default_factory is not MISSING:
                default = field.default_factory()
            yield f"{prefix}{field.name}", hint, default


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def check(config: TrainConfig) -> None:
    """Refuse a configuration that could not be meant: types, ranges and contradictions.

    Raises:
        ConfigError: says which value, what was expected and the nearest legal value.
        StrategyError: the strategy cannot be read, is not built, or does not fit nproc.
    """
    for key, hint, _ in settings(TrainConfig):
        check_value(key, hint, value_at(config, key))
    if config.optimizer.clip_p not in (1, 2, math.inf):
        near = min((1.0, 2.0, math.inf), key=lambda p: abs(p - config.optimizer.clip_p))
        raise ConfigError(
            f"optimizer.clip_p is {config.optimizer.clip_p:g}; expected 1, 2 or inf, of which "
            f"{near:g} is the nearest"
        )
    _check_contradictions(config)
    if config.strategy is not None:
        strategy = Strategy.parse(config.strategy)
        require_built(strategy)
        if config.nproc is not None:
            check_ranks(strategy, config.nproc)


def check_value(key: str, hint: Any, value: Any) -> None:
    """Raise ConfigError unless the value alone is one that its key may have."""
    check_type(key, hint, value)
    if key in RANGES and value is not None:
        check_range(key, value)
    if isinstance(value, str):
        _check_text(key, value)


def _check_text(key: str, value: str) -> None:
    """Raise ConfigError for what no file or name can be, and no file of settings can hold."""
    if not value.strip():
        raise ConfigError(
            f"{key} is empty, such as a variable of the shell that is not set; give it a value, or "
            "leave it out"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{key} is {value!r}, which is not UTF-8, so that no record of the run could name it; "
            "give it a name in UTF-8, such as that of a link"
        ) from None


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself as the only one."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def choices(hint: Any) -> list[str]:
    """Return the words that a Literal allows; none for any other type."""
    return [
        word
        for member in members(hint)
        if typing.get_origin(member) is Literal
        for word in typing.get_args(member)
    ]


def check_type(key: str, hint: Any, value: Any) -> None:
    """Refuse a value that is not of the type of its key.

    Raises:
        ConfigError: names the key, the value and what was expected.
    """
    if _fits(hint, value):
        return
    near = ""
    if isinstance(value, str):
        near = nearest(value, choices(hint))
    elif isinstance(value, float) and int in members(hint) and math.isfinite(value):
        near = f", of which {round(value)} is the nearest"
    raise ConfigError(f"{key} is {value!r}; expected {describe(hint)}{near}")


def describe(hint: Any) -> str:
    """Return what a value of this type is, in words."""
    if words := choices(hint):
        return f"one of {', '.join(words)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " or ".join(words[member] for member in members(hint) if member is not type(None))


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


def _fits(hint: Any, value: Any) -> bool:
    """Return whether the value is of this type; a whole number is a number, true is not."""
    for member in members(hint):
        if typing.get_origin(member) is Literal:
            if value in typing.get_args(member):
                return True
        elif isinstance(value, bool):
            if member is bool:
                return True
        elif isinstance(value, (int, float) if member is float else member):
            return True
    return False


def check_range(key: str, value: float) -> None:
    """Raise ConfigError unless the number lies in its interval."""
    low, high, brackets = RANGES[key]
    above = value > low or (value == low and brackets[0] == "[")
    below = value < high or (value == high and brackets[1] == "]")
    if above and below:  # false for nan
        return
    if math.isinf(high) or (high > 1 and not above):
        expected = f"{'at least' if brackets[0] == '[' else 'more than'} {low}"
        expected += " and finite" if above else ""
    else:
        expected = f"a number in {brackets[0]}{low}, {high}{brackets[1]}"
    if math.isnan(value):
        pass  # no number is near
    elif not above and brackets[0] == "[":
        expected += f"; the nearest is {low}"
    elif not below and brackets[1] == "]":
        expected += f"; the nearest is {high}"
    raise ConfigError(f"{key} is {value}; expected {expected}")


def _check_contradictions(config: TrainConfig) -> None:
    """Raise ConfigError where two settings cannot both be meant, or one would be ignored."""
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(
            f"steps is {config.steps} and epochs is {config.epochs:g}, but each fixes the length "
            "of the run; give one of them ('--epochs none' unsets the other)"
        )
    warmup_steps = config.optimizer.warmup_steps
    if config.steps is not None and warmup_steps is not None and warmup_steps >= config.steps:
        raise ConfigError(
            f"optimizer.warmup_steps is {warmup_steps}, but the run has {config.steps} steps; the "
            f"nearest is {config.steps - 1}"
        )
    if config.init is not None and config.resume is not None:
        raise ConfigError(
            f"init is {config.init} and resume is {config.resume}, but each says where the weights "
            "come from; resume goes on with a run, init begins another from its weights"
        )
    if config.tokenizer is not None and config.corpus.vocab_size is not None:
        raise ConfigError(
            f"corpus.vocab_size is {config.corpus.vocab_size}, the size of a tokenizer to train, "
            f"but tokenizer is {config.tokenizer}, which is trained; give one of them"
        )
    longest = config.shape.max_seq_len
    if longest is not None and config.corpus.seq_len > longest:
        raise ConfigError(
            f"corpus.seq_len is {config.corpus.seq_len}, longer than shape.max_seq_len {longest}; "
            f"the nearest is {longest}"
        )
    if config.precision == "float16" and config.device == "cpu":
        raise ConfigError(
            "precision is float16 and device is cpu; float16 needs a GPU, bfloat16 is the nearest "
            "for a CPU"
        )
