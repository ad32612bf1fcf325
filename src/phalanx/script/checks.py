"""Checks of a trainer's arguments before its first step; each error message is one sentence.

Fields are checked against their annotated types and ranges, as command-line settings are. The
results of the user's functions (model, optimizer, schedule, count) are checked separately.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sized
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx.checkpoint.encoding import encoded
from phalanx.checkpoint.optimizer_state import AT_OWNERS, DRY_SHAPE, dry_state
from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.config.fields import (
    SEED,
    TIMEOUT_S,
    Range,
    check_value,
    settings,
    value_at,
)
from phalanx.config.schema import MOST_ROWS
from phalanx.errors import CheckpointError, ConfigError, DataError, ScriptError
from phalanx.launch.agreement import check_same
from phalanx.parallel.pipeline.cut import strategy_facts
from phalanx.script.optimizer import HELD, check_kind, unsavable_state
from phalanx.strategy import Strategy
from phalanx.train.objective import Objective

_FOREIGN = ("objective", "data", "validation", "callbacks", "log")
"""Fields whose types the settings do not support, so that `check_settings` skips them."""

_OF_A_HOST = ("threads", "timeout_s", "log_to")
"""Settings that may differ between hosts."""


def check_settings(config: Any) -> None:
    """Refuse a field of a `Trainer` or its `Options` of the wrong type or out of range."""
    for setting in settings(type(config)):
        if setting.key not in _FOREIGN:
            try:
                check_value(setting, value_at(config, setting.key))
            except ConfigError as error:
                raise ConfigError(f"phalanx.{type(config).__name__}: {error}") from None


def check_same_job(trainer: Any, strategy: Strategy, options: Any) -> None:
    """Refuse settings that differ between the hosts of torchrun; all ranks call this together."""
    facts: dict[str, Any] = dict(strategy_facts(strategy))
    for config in (trainer, options):
        values = {each.key: value_at(config, each.key) for each in settings(type(config))}
        plain = {key: v for key, v in values.items() if isinstance(v, (int, float, str, NoneType))}
        facts |= {key: value for key, value in plain.items() if key not in _OF_A_HOST}
    check_same(gather_objects(facts))


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Plain arguments of `phalanx.init` and of methods of `Run`, with their ranges."""

    accumulation: Annotated[int, Range(1, MOST_ROWS, "[]")]
    seed: Annotated[int, SEED]
    device: Literal["auto", "cpu", "cuda"]
    nonfinite: Literal["stop", "skip"]
    timeout_s: Annotated[float | None, TIMEOUT_S]
    keep: Annotated[int | None, Range(1)]
    memory_every: Annotated[int | None, Range(0)]
    max_norm: Annotated[float, Range(0, ends="(]")]
    p: Annotated[float, Range(0, ends="(]")]
    decay: Annotated[float | None, Range(0, 1)]
    rows: Annotated[int, Range(1)]


def check_arguments(call: str, **given: Any) -> None:
    """Refuse an argument of `call` that has the wrong type or is out of range."""
    for setting in settings(_Arguments):
        if setting.key in given:
            try:
                check_value(setting, given[setting.key])
            except ConfigError as error:
                raise ConfigError(f"{call}: {error}") from None


def check_objective(objective: Any) -> None:
    """Check that `objective` has the methods `loss_sum` and `num_valid`."""
    names = [name for name in vars(Objective) if name in ("loss_sum", "num_valid")]
    missing = [name for name in names if not callable(getattr(objective, name, None))]
    if isinstance(objective, type) and not missing:
        raise ConfigError(
            f"phalanx.Trainer: objective is the class {objective.__name__}; expected an instance, "
            f"{objective.__name__}(...)"
        )
    if missing:
        raise ConfigError(
            f"phalanx.Trainer: objective is {_described(objective)}, without {missing[0]}; "
            "expected an object with loss_sum(model, microbatch, step) and num_valid(microbatch)"
        )


def check_data(name: str, data: Any, *, is_trained: bool) -> None:
    """Check that `data` is an IterableDataset, or a map-style dataset with a length above 0."""
    if isinstance(data, IterableDataset):
        return
    if isinstance(data, DataLoader):
        raise ConfigError(
            f"phalanx.Trainer: {name} is a DataLoader, but the trainer makes its own; give the "
            "dataset, and give batch_size, shuffle and collate to phalanx.Trainer"
        )
    is_rows = isinstance(data, Dataset) or all(
        hasattr(data, method) for method in ("__getitem__", "__len__")
    )
    if not is_rows or isinstance(data, str | dict):
        raise ConfigError(
            f"phalanx.Trainer: {name} is {_described(data)}; expected a torch Dataset, or an "
            "object with __getitem__ and __len__"
        )
    try:
        length = len(cast(Sized, data))
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"phalanx.Trainer: {name} is a {type(data).__name__}, which has no length, so the end "
            "of a pass is unknown; give it __len__, or make it a torch.utils.data.IterableDataset"
        ) from error
    if length == 0:
        what = "train on" if is_trained else "measure"
        raise DataError(f"phalanx.Trainer: {name} has 0 samples; expected at least 1 to {what}")


def check_model(model: Any) -> None:
    """Check that `build` returned a module with at least one trainable parameter."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"phalanx.Trainer: build returns {_described(model)}; expected a torch.nn.Module"
        )
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        has = f"{len(parameters)} parameters, all frozen" if parameters else "no parameters"
        raise ConfigError(
            f"phalanx.Trainer: the {type(model).__name__} that build returns has {has}; expected "
            "at least one with requires_grad"
        )


def optimizer_of(
    make: Callable[[Any], torch.optim.Optimizer], model: nn.Module, comm: Comm
) -> torch.optim.Optimizer:
    """Make the optimizer of a model that has been split, and check that it can be used."""
    try:
        made: Any = make(model.parameters())
    except ValueError as error:
        if any(parameter.requires_grad for parameter in model.parameters()):
            raise
        raise ConfigError(
            "phalanx.Trainer: optimizer leaves out frozen parameters, and this pipeline stage has "
            "no others; make it from all parameters that the function is given, of which it "
            f"updates only the trained ones ({error})"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"phalanx.Trainer: optimizer returns {_described(made)}; expected a "
            "torch.optim.Optimizer"
        )
    optimizer, ours = made, set(model.parameters())
    for group in optimizer.param_groups:
        if foreign := [p for p in group["params"] if p not in ours]:
            raise ScriptError(
                f"phalanx.Trainer: the {type(optimizer).__name__} updates a parameter of shape "
                f"{tuple(foreign[0].shape)} that the model does not have; make it from the "
                "parameters that the function is given"
            )
    if needed := _needed(type(optimizer).step):
        raise ConfigError(
            f"phalanx.Trainer: a step of {type(optimizer).__name__} needs a {needed}, which the "
            "trainer does not give; take another optimizer, or phalanx.init and a loop of your own"
        )
    check_kind(optimizer, ours, "phalanx.Trainer", comm)
    if getattr(optimizer, "state_at_owners", False):
        raise CheckpointError(
            f"phalanx.Trainer: {type(optimizer).__name__} {AT_OWNERS}; take phalanx.init and a "
            "loop of your own"
        )
    # An optimizer that cannot step a dummy parameter is checked after its first real step.
    state = dry_state(optimizer, optimizer.param_groups[0]) or {}
    if words := unsavable_state(state, torch.Size(DRY_SHAPE)):
        raise CheckpointError(f"phalanx.Trainer: {type(optimizer).__name__} {words}; {HELD}")
    return optimizer


def scheduler_of(
    make: Callable[[Any], Any] | None, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Make and check the learning rate schedule of `optimizer`; None if `make` is None."""
    if make is None:
        return None
    scheduler = make(optimizer)
    lacking = [n for n in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, n)]
    if lacking:
        raise ConfigError(
            f"phalanx.Trainer: scheduler returns {_described(scheduler)}, without {lacking[0]}; "
            "expected a torch.optim.lr_scheduler.LRScheduler"
        )
    kind = type(scheduler).__name__
    if needed := _needed(type(scheduler).step):
        raise ConfigError(
            f"phalanx.Trainer: a step of {kind} needs {needed}, which the trainer does not give; "
            "take another schedule, or phalanx.init and a loop of your own"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"phalanx.Trainer: the {kind} belongs to another optimizer; make it from the optimizer "
            "that the function receives"
        )
    encoded(scheduler.state_dict(), kind)
    return scheduler


def check_count(count: Any) -> None:
    """Check that `Objective.num_valid` returned an integer: an int >= 0, or an integer tensor."""
    is_tensor = isinstance(count, torch.Tensor) and count.numel() == 1
    is_whole = is_tensor and not (count.is_floating_point() or count.is_complex())
    is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    if not (is_whole or is_count):
        raise ScriptError(
            f"Objective.num_valid: the count is {_described(count)}; expected how many samples or "
            "tokens the loss is a sum over, a whole number such as len(labels)"
        )


@functools.cache
def _needed(step: Callable[..., Any]) -> str:
    """Return the name of the first required argument of `step`, or an empty string."""
    for parameter in list(inspect.signature(step).parameters.values())[1:]:
        is_named = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if is_named and parameter.default is parameter.empty:
            return parameter.name
    return ""


def _described(value: Any) -> str:
    """Describe a value in a few words for a message."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
