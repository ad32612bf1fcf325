"""Convert a script's values to JSON and back, with non-string keys, Counters and tuples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch

from phalanx.checkpoint.untrusted import brief, check_plain
from phalanx.errors import CheckpointError

_PAIRS: Final = "pairs"
_COUNTER: Final = "counter"
"""Only key of a JSON object that encodes a Counter; _PAIRS: a mapping with non-string keys."""


def encoded(value: Any, what: str) -> Any:
    """Return a value, the state of `what`, converted to JSON values.

    Also supported: mappings with keys that are not strings, Counters, tuples and 0-d tensors.

    Raises:
        CheckpointError: the value contains other types, or is nested too deeply to be read again.
    """
    try:
        made = json.loads(json.dumps(_encoded(value)))
        check_plain([[[made]]])  # the nesting depth inside a manifest
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save the state of {what}: {error}; expected numbers, text, lists and "
            "mappings of them"
        ) from error
    return made


def decoded(value: Any) -> Any:
    """Return the value that `encoded` converted to `value`, with lists in place of tuples.

    Raises:
        ValueError: `encoded` cannot have returned `value`.
    """
    if isinstance(value, list):
        return [decoded(each) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if {*entries} not in ({_PAIRS}, {_COUNTER}):
        return {name: decoded(each) for name, each in entries.items()}
    ((kind, pairs),) = entries.items()
    if not isinstance(pairs, list):
        raise ValueError(f"its {kind} are {brief(pairs)}")
    found = {key: decoded(each) for key, each in cast("list[Any]", pairs)}
    return Counter(found) if kind == _COUNTER else found


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        is_named = all(isinstance(key, str) for key in entries)
        if is_named and not isinstance(value, Counter) and {*entries} not in ({_PAIRS}, {_COUNTER}):
            return {key: _encoded(each) for key, each in entries.items()}
        pairs = [[key, _encoded(each)] for key, each in entries.items()]
        return {_COUNTER if isinstance(value, Counter) else _PAIRS: pairs}
    if isinstance(value, list | tuple):
        return [_encoded(each) for each in cast("Sequence[Any]", value)]
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
