"""State of optimizers and schedules: its saved form, and checks before it is loaded.

A checkpoint may come from another person, or be damaged. So loaded values are compared with this
run's: their names must exist here, and their types must match. A state that could not be loaded
again is refused before it is written.

    optimizer.<name>.<key>      tensors of files: `check_state_keys`, `check_values`
    OptimizerSettings, SavedSchedule   JSON values of the manifest
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn

from phalanx.checkpoint.encoding import decoded, encoded
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.comm import local_shard
from phalanx.errors import CheckpointError

SQUARES: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "row_var", "col_var")
"""State keys of torch's optimizers whose values are means of squares, hence at least 0.

Adagrad's `sum` is excluded, because a user's optimizer may have a `sum` below 0."""


class CombinedOptimizer:
    """Several optimizers with the attributes of one that checkpoints use."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Collect the present parameter groups and states of `parts`."""
        self.parts = parts
        self.param_groups = [group for each in parts for group in each.param_groups]
        self.state = {p: held for each in parts for p, held in each.state.items()}


AnyOptimizer = torch.optim.Optimizer | CombinedOptimizer

AT_OWNERS: Final = "keeps its state at the owners of whole matrices, where no checkpoint reads it"
"""Of an optimizer with the attribute `state_at_owners`, which `script.optimizer.AtOwners` sets."""


def parts_of(optimizer: AnyOptimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that one combines, or the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def check_state_keys(
    moments: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor],
    optimizer: AnyOptimizer,
) -> None:
    """Raise CheckpointError if a parameter's saved state has other keys than `optimizer` stores."""
    found: dict[str, set[str]] = {}
    for stored_name in moments:
        name, key = parameter_and_key(stored_name)
        found.setdefault(name, set()).add(key)
    names = {parameter: name for name, parameter in trained.items()}
    for part, group in [(p, group) for p in parts_of(optimizer) for group in p.param_groups]:
        if (kept := dry_state(part, group)) is None:
            continue
        keys = {key for key, value in kept.items() if value is not None}
        for name in (names[parameter] for parameter in group["params"]):
            if (has := found.get(name)) is not None and has != keys:
                wrong = next(iter(sorted(has ^ keys)))
                lacks = "has a" if wrong in has else "lacks the"
                raise CheckpointError(
                    f"it is of another optimizer: its state of {name} {lacks} {brief(wrong)}, and "
                    f"this run's {type(part).__name__} keeps {', '.join(sorted(keys))}"
                )


def check_values(moments: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError on step counts and means of squares that no optimizer can have."""
    for stored_name, value in moments.items():
        name, key = parameter_and_key(stored_name)
        if key == "step":
            count = float(value)
            if not (0 <= count < 2**53 and count.is_integer()):
                raise CheckpointError(
                    f"its optimizer has taken {count:g} steps of {name}; expected a whole number "
                    "from 0 to 2**53 - 1"
                )
        elif key in SQUARES and (local_shard(value) < 0).any():
            raise CheckpointError(
                f"the {key} of {name} has elements below 0; expected means of squares"
            )


def parameter_and_key(stored_name: str) -> tuple[str, str]:
    """Return the parameter name and the key in `optimizer.<name>.<key>`."""
    name, _, key = stored_name.removeprefix("optimizer.").rpartition(".")
    return name, key


DRY_SHAPE: Final = (3, 2)
"""Shape of the dummy parameter of `dry_state`; factored state of it has a different shape."""


def dry_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state an optimizer stores after one step on a dummy parameter of `group`.

    The dummy parameter has DRY_SHAPE. The optimizer, its parameters and its state do not change.

    Returns:
        The state by key; None if the step fails, for example because the optimizer needs sparse
        gradients, or has attributes that `Optimizer.__getstate__` drops from a copy.
    """
    like = next(iter(group["params"]), torch.zeros(()))
    parameter = nn.Parameter(torch.zeros(DRY_SHAPE, dtype=like.dtype, device=like.device))
    parameter.grad = torch.ones_like(parameter)
    dry = copy.copy(optimizer)
    dry.state = defaultdict(dict)
    # One matrix, because the parts of a fused weight of Muon need not divide the dummy's rows.
    dry.param_groups = [{**group, "params": [parameter], "parts": (1,)}]
    try:
        dry.step()
    except Exception:  # a user's optimizer may raise anything on an unknown parameter
        return None
    return dict(dry.state[parameter])


_COUNTS: Final = ("last_epoch", "_step_count")
"""Step counters in the state of each torch schedule; integers."""

_OF_SCHEDULES: Final = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Settings that torch's schedules add to a group; a schedule may be made after the resume."""

_RATES: Final = ("lr", *_OF_SCHEDULES)
"""Settings that are at least 0."""


class SavedSchedule:
    """A learning-rate schedule, as a part of a run."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the encoded state."""
        return encoded(self._scheduler.state_dict(), type(self._scheduler).__name__)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Check an encoded state, and load it."""
        scheduler, kind = self._scheduler, type(self._scheduler).__name__
        try:
            state, own = decoded(saved), decoded(self.state_dict())
            if type(scheduler).__module__.startswith("torch.optim."):
                _check_schedule(own, state)
            # The saved state of a user's own class may have further entries, but none that would
            # overwrite a method.
            elif hidden := [name for name in state if name not in own and hasattr(scheduler, name)]:
                raise ValueError(f"it has the unknown entry {brief(hidden[0])}")
            scheduler.load_state_dict(state)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"cannot resume {kind}: its saved state does not fit this schedule: "
                f"{brief(error, 200)}"
            ) from error


class OptimizerSettings:
    """The settings of each parameter group of an optimizer, as a part of a run."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the encoded settings of the groups, without their parameters."""
        what = f"{type(self._optimizer).__name__}, its settings"
        groups = self._optimizer.param_groups
        return [encoded({k: v for k, v in each.items() if k != "params"}, what) for each in groups]

    def load_state_dict(self, groups: list[dict[str, Any]]) -> None:
        """Check encoded settings, and restore them."""
        optimizer, kind = self._optimizer, type(self._optimizer).__name__
        if len(groups) != (here := len(optimizer.param_groups)):
            raise CheckpointError(
                f"it was saved with an optimizer of {len(groups)} parameter groups, but this "
                f"script's {kind} has {here}; make the same optimizers"
            )
        for group, own, saved in zip(
            optimizer.param_groups, self.state_dict(), groups, strict=True
        ):
            try:
                settings = _checked_settings(optimizer, group, decoded(own), decoded(saved))
            except (ValueError, TypeError, OverflowError, RuntimeError) as error:
                raise CheckpointError(
                    f"the saved settings do not fit {kind}: {brief(error, 200)}; make the same "
                    "optimizer"
                ) from error
            group.update(settings)


def _checked_settings(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    own: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return saved settings of a group, or raise ValueError if no step can be taken with them."""
    for name, value in settings.items():
        if name not in own and name not in _OF_SCHEDULES:
            raise ValueError(f"it has the unknown setting {brief(name)}")
        _check_alike(own.get(name, 0.0), value, brief(name), is_setting=True)
        if name in _RATES and value is not None and not value >= 0:
            raise ValueError(f"{name} is {brief(value)}, expected at least 0")
    if "lr" in own and "lr" not in settings:
        raise ValueError("it has no 'lr'")
    checked = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    # Refuse settings with which the optimizer cannot be made, or can no longer step.
    kind: type[Any] = type(optimizer)
    if kind.__module__.startswith("torch.optim."):  # its arguments are settings
        named = {n: checked[n] for n in inspect.signature(kind).parameters if n in checked}
        kind([nn.Parameter(torch.zeros(DRY_SHAPE))], **named)
    after = dry_state(optimizer, {**group, **checked})
    if after is None and dry_state(optimizer, group) is not None:
        raise ValueError("it cannot step with these settings")
    return checked


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
