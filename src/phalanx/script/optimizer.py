"""An optimizer of torch over a model that has been split: the same groups, this rank's shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.errors import ScriptError

Names = Mapping[nn.Parameter, str]
"""The parameters of a model before it was split, and their names."""


class Steps(Protocol):
    """What an optimizer asks before it steps, and tells afterwards."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step whose gradients are not those of the global batch."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the step."""
        ...


def rebind(optimizer: torch.optim.Optimizer, before: Names, model: nn.Module) -> None:
    """Have an optimizer update the parameters of `model` in place of those that it had `before`.

    Groups, their settings and whoever holds the optimizer, such as a scheduler, stay as they are.

    Raises:
        ScriptError: it updates a parameter of another model, or has taken steps already.
    """
    after = dict(model.named_parameters(remove_duplicate=False))
    ours = set(after.values())
    if optimizer.state:
        raise ScriptError(
            f"prepare: the {type(optimizer).__name__} has taken steps already, and its state is of "
            "parameters that are not split; prepare it before its first step, and go on from a "
            "checkpoint by run.resume"
        )
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in ours and parameter not in before:
                raise ScriptError(
                    f"prepare: the {type(optimizer).__name__} updates a parameter of shape "
                    f"{tuple(parameter.shape)} in group {number} that the prepared model does not "
                    "have; make the optimizer from the parameters of that model"
                )
        group["params"] = [p if p in ours else after[before[p]] for p in group["params"]]


def guard(optimizer: torch.optim.Optimizer, steps: Steps) -> None:
    """Have each step of an optimizer checked, whoever calls it."""

    def told(tell: Callable[[torch.optim.Optimizer], None], own: Any, *_: Any) -> None:
        tell(own)

    optimizer.register_step_pre_hook(functools.partial(told, steps.before_step))
    optimizer.register_step_post_hook(functools.partial(told, steps.after_step))
