"""Convert values of a script and states of random generators to what a checkpoint stores, and back.

Values become JSON, which also encodes non-string keys, Counters and tuples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn

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
        plain = json.loads(json.dumps(_encoded(value)))
        check_plain([[[plain]]])  # the nesting depth inside a manifest
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save the state of {what}: {error}; expected numbers, text, lists and "
            "mappings of them"
        ) from error
    except RecursionError:
        raise CheckpointError(
            f"cannot save the state of {what}: it contains itself, or is nested too deeply"
        ) from None
    return plain


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


def generators_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the states of torch's CPU generator and, for a model on a GPU, the GPU's generator."""
    states = {"cpu": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: dict[str, torch.Tensor]) -> None:
    """Restore the states of this rank's generators.

    Raises:
        CheckpointError: a state is not a valid generator state.
    """
    try:
        for device, state in states.items():
            (torch.cuda if device == "cuda" else torch).set_rng_state(state)
    except RuntimeError as error:
        raise CheckpointError(f"its generator state is not valid: {error}") from error


def to_text(generator: torch.Tensor | None) -> str:
    """Return a generator state as hexadecimal text; empty for None."""
    return "" if generator is None else generator.numpy().tobytes().hex()


def from_text(text: str) -> torch.Tensor | None:
    """Return the generator state that `to_text` encoded; None for empty text."""
    if not text:
        return None
    try:
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"a generator state of the checkpoint, {brief(text)}, is not valid: {brief(error)}"
        ) from error
    return state


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        # A value and its JSON, where an object of one marked key is no plain mapping:
        #
        #     {"a": 1}                {"a": 1}
        #     {1: "x", (2, 3): 0}     {"pairs": [[1, "x"], [{"a tuple": [2, 3]}, 0]]}
        #     Counter(a=2)            {"counter": [["a", 2]]}
        #     (1, 2)                  {"a tuple": [1, 2]}
        #     {"pairs": 5}            {"pairs": [["pairs", 5]]}      a user's own marked key
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
