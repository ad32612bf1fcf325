"""Encode optimizer settings and schedule states as JSON values, and check them on load.

A checkpoint may come from another person, or be damaged. So loaded values are compared with this
run's: their names must exist here, and their types must match. A state that could not be loaded
again is refused before it is written.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from phalanx.checkpoint.dry_step import DRY_SHAPE, dry_state
from phalanx.checkpoint.encoding import decoded, encoded
from phalanx.checkpoint.untrusted import brief
from phalanx.errors import CheckpointError

_COUNTS: Final = ("last_epoch", "_step_count")
"""Step counters in the state of each torch schedule; integers."""

_OF_SCHEDULES: Final = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Settings that torch's schedules add to a group; a schedule may be made after the resume."""

_RATES: Final = ("lr", *_OF_SCHEDULES)
"""Settings that are at least 0."""


def load_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Check the saved state of a schedule, and load it into `scheduler`."""
    kind = type(scheduler).__name__
    try:
        state, own = decoded(saved), decoded(encoded(scheduler.state_dict(), kind))
        if type(scheduler).__module__.startswith("torch.optim."):
            _check_schedule(own, state)
        # The saved state of a user's own class may have further entries, but none that would
        # overwrite a method.
        elif hidden := [name for name in state if name not in own and hasattr(scheduler, name)]:
            raise ValueError(f"it has the unknown entry {brief(hidden[0])}")
        scheduler.load_state_dict(state)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"cannot resume {kind}: its saved state does not fit this schedule: {brief(error, 200)}"
        ) from error


def settings_of(group: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the encoded settings of a parameter group, without its parameters."""
    own = {name: value for name, value in group.items() if name != "params"}
    return encoded(own, f"{what}, its settings")


def load_settings(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], saved: Mapping[str, Any]
) -> None:
    """Check the saved settings of a parameter group, and restore them."""
    what = type(optimizer).__name__
    try:
        settings, own = decoded(saved), decoded(settings_of(group, what))
        for name, value in settings.items():
            if name not in own and name not in _OF_SCHEDULES:
                raise ValueError(f"it has the unknown setting {brief(name)}")
            _check_alike(own.get(name, 0.0), value, brief(name), is_setting=True)
            if name in _RATES and value is not None and not value >= 0:
                raise ValueError(f"{name} is {brief(value)}, expected at least 0")
        if "lr" in own and "lr" not in settings:
            raise ValueError("it has no 'lr'")
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        # Refuse settings with which the optimizer cannot be made, or can no longer step.
        kind: type[Any] = type(optimizer)
        if kind.__module__.startswith("torch.optim."):  # its arguments are settings
            given = {n: settings[n] for n in inspect.signature(kind).parameters if n in settings}
            kind([nn.Parameter(torch.zeros(DRY_SHAPE))], **given)
        after = dry_state(optimizer, {**group, **settings})
        if after is None and dry_state(optimizer, group) is not None:
            raise ValueError("it cannot step with these settings")
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved settings do not fit {what}: {brief(error, 200)}; make the same optimizer"
        ) from error
    group.update(settings)


def _check_schedule(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit this torch schedule: names, counters and types."""
    if unknown := [name for name in saved if name not in own]:
        raise ValueError(f"it has the unknown entry {brief(unknown[0])}")
    for name in _COUNTS:
        count = saved.get(name)
        if name in own and not (type(count) is int and -1 <= count < 1 << 62):
            raise ValueError(f"its {name} is {brief(count)}, expected a count of steps")
    if saved.get("last_epoch", 0) > saved.get("total_steps", math.inf):
        raise ValueError(f"its last_epoch {saved['last_epoch']} is above its total_steps")
    for name, value in own.items():
        if name in saved:
            _check_alike(value, saved[name], brief(name))


def _check_alike(own: Any, saved: Any, what: str, *, is_setting: bool = False) -> None:
    """Refuse a saved value whose type differs from the type of this run's value.

    Integers and floats are interchangeable. Where this run has None, any value is accepted; for a
    setting, only None or a bool.
    """
    if not _is_alike(own, saved, is_setting):
        raise ValueError(f"{what} is {brief(saved)}, and this run has {brief(own)}")
    match own, saved:
        case list() | tuple(), list() | tuple():  # earlier versions saved tuples as lists
            pairs = zip(cast("list[Any]", own), cast("list[Any]", saved), strict=False)
            for number, (mine, theirs) in enumerate(pairs):
                _check_alike(mine, theirs, f"{what}[{number}]", is_setting=is_setting)
        case dict(), dict():
            mine, theirs = cast("dict[Any, Any]", own), cast("dict[Any, Any]", saved)
            if _COUNTS[0] in mine:  # state of a nested schedule
                _check_schedule(mine, theirs)
            elif mine:  # its keys are names of the script, or steps
                usual = next(iter(mine.values()))
                for name, value in theirs.items():
                    _check_alike(mine.get(name, usual), value, brief(name))
        case _:
            pass


def _is_alike(own: Any, saved: Any, is_setting: bool) -> bool:
    """Return whether two values have compatible types; ignore the types of their items."""
    if own is None:
        return saved is None or isinstance(saved, bool) or not is_setting
    if saved is None:
        return is_setting and isinstance(own, bool)  # None: left to torch in the saved run
    if isinstance(own, bool) or isinstance(saved, bool):
        return type(own) is type(saved)
    if isinstance(own, int | float):
        is_finite = isinstance(saved, int | float) and math.isfinite(saved)
        return is_finite or (isinstance(saved, float) and not math.isfinite(own))
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        items = cast("list[Any]", own)
        is_fixed = is_setting or any(isinstance(each, dict) for each in items)
        return len(items) == len(cast("list[Any]", saved)) or not is_fixed
    return type(own) is type(saved)
