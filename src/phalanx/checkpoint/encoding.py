"""Convert a script's values to JSON and back, with non-string keys, Counters and tuples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch

from phalanx.checkpoint.untrusted import brief, check_plain
from phalanx.errors import CheckpointError

_PAIRS: Final = "pairs"
_COUNTER: Final = "counter"
_TUPLE: Final = "a tuple"
_KINDS: Final = (_PAIRS, _COUNTER, _TUPLE)
"""Only key of a JSON object that encodes a mapping with other keys than strings, or one of the
other kinds; the keys of a mapping are encoded as its values are."""

_PLAIN: Final = frozenset((str, int, float, bool, type(None)))


def is_plain(items: Iterable[Any]) -> bool:
    """Return whether all items are numbers, text or None; a long list mostly has nothing else."""
    return {*map(type, items)} <= _PLAIN


def encoded(value: Any, what: str) -> Any:
    """Return a value, the state of `what`, as JSON values; `decoded` returns an equal one.

    Also supported: mappings with keys that are not strings, Counters, tuples and 0-d tensors.

    Raises:
        CheckpointError: the value contains other types or itself, or is nested too deeply to be
            read again.
    """
    try:
        made = json.loads(json.dumps(_encoded(value)))
        check_plain([[[made]]])  # the nesting depth inside a manifest
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save the state of {what}: {error}; expected numbers, text, lists and "
            "mappings of them"
        ) from error
    except RecursionError:
        raise CheckpointError(
            f"cannot save the state of {what}: it contains itself, or is nested too deeply"
        ) from None
    return made


def decoded(value: Any) -> Any:
    """Return the value that `encoded` converted to `value`.

    Raises:
        ValueError: `encoded` cannot have returned `value`.
        TypeError: likewise.
    """
    if isinstance(value, list):
        return [decoded(each) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if len(entries) != 1 or (kind := next(iter(entries))) not in _KINDS:
        return {name: decoded(each) for name, each in entries.items()}
    items = entries[kind]
    if not isinstance(items, list):
        raise ValueError(f"its {kind} is {brief(items)}")
    if kind == _TUPLE:
        return tuple(decoded(items))
    found = {decoded(key): decoded(each) for key, each in cast("list[Any]", items)}
    return Counter(found) if kind == _COUNTER else found


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        is_named = all(isinstance(key, str) for key in entries)
        is_marked = len(entries) == 1 and next(iter(entries)) in _KINDS
        if is_named and not isinstance(value, Counter) and not is_marked:
            return {key: _encoded(each) for key, each in entries.items()}
        pairs = [[_encoded(key), _encoded(each)] for key, each in entries.items()]
        return {_COUNTER if isinstance(value, Counter) else _PAIRS: pairs}
    if isinstance(value, list | tuple):
        items = list(cast("Sequence[Any]", value))
        if not is_plain(items):
            items = [_encoded(each) for each in items]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
