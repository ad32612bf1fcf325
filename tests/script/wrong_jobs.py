"""Jobs for the trainer with one thing wrong, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jobs import Classes, OnlyOnce, perceptron_of_doubles
from loops import Numbers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx


class NoLength:
    def __getitem__(self, index: int) -> Any:
        return Numbers()[index]


class Counting(Classes):
    def __init__(self, count: Any) -> None:
        self.count = count

    def num_valid(self, microbatch: Any) -> Any:
        return self.count


class NoGraph(Classes):
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return super().loss_sum(model, microbatch, step).detach()


class OnMovedInputs(Classes):
    """The loss on inputs that a step by their gradient has moved."""

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        x, y = microbatch
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().loss_sum(model, (moved, y), step), moved)
        return super().loss_sum(model, (x + slope.sign(), y), step)


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def frozen() -> nn.Module:
    return perceptron_of_doubles().requires_grad_(False)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters)


def adafactor(parameters: Any) -> Any:
    return torch.optim.Adafactor(parameters)


def rprop(parameters: Any) -> Any:
    return torch.optim.Rprop(parameters)


def none(*_: Any) -> Any:
    return None


def of_another(_: Any) -> Any:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)


def on_plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def of_another_optimizer(_: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(of_another(None), 1)


def of_sets(optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.__dict__["seen"] = {1, 2}
    return scheduler


AT_ONCE: dict[str, tuple[dict[str, Any], str]] = {
    "batch_size 0": ({"batch_size": 0}, "batch_size is 0; expected at least 1; the nearest is 1"),
    "batch_size -1": ({"batch_size": -1}, "batch_size is -1; expected at least 1"),
    "batch_size text": ({"batch_size": "8"}, "batch_size is '8'; expected a whole number"),
    "accumulation 0": ({"accumulation": 0}, "accumulation is 0; expected at least 1"),
    "accumulation -1": ({"accumulation": -1}, "accumulation is -1; expected at least 1"),
    "steps text": ({"steps": "5"}, "steps is '5'; expected a whole number"),
    "steps 0": ({"steps": 0}, "steps is 0; expected at least 1"),
    "steps -1": ({"steps": -1}, "steps is -1; expected at least 1"),
    "epochs 0": ({"epochs": 0}, "epochs is 0; expected at least 1"),
    "epochs 1.5": ({"epochs": 1.5}, "epochs is 1.5; expected a whole number; the nearest is 2"),
    "seed text": ({"seed": "a"}, "seed is 'a'; expected a whole number"),
    "seed too large": ({"seed": 2**70}, "the nearest is 9223372036854775807"),
    "max_norm -1": ({"max_norm": -1.0}, "max_norm is -1.0; expected at least 0"),
    "max_norm nan": ({"max_norm": float("nan")}, "max_norm is nan; expected at least 0"),
    "roles": ({"roles": 3}, "roles is 3; expected texts by text"),
    "roles of numbers": ({"roles": {"a": 1}}, "expected texts by text"),
    "batch_norm": ({"batch_norm": "globl"}, "did you mean 'global'?"),
    "shuffle": ({"shuffle": 1}, "shuffle is 1; expected true or false"),
    "optimizer": ({"optimizer": None}, "optimizer is None; expected a function"),
    "scheduler": ({"scheduler": 3}, "scheduler is 3; expected a function"),
    "collate": ({"collate": 3}, "collate is 3; expected a function"),
    "build": ({"build": perceptron_of_doubles().children()}, "expected a function"),
    "build is a module": ({"build": perceptron_of_doubles()}, "expected a function that returns a"),
    "objective": ({"objective": None}, "objective is None, without loss_sum"),
    "objective of a function": ({"objective": frozen}, "objective is a function, without loss"),
    "objective of a class": ({"objective": Classes}, "objective is the class Classes; expected"),
    "data []": ({"data": []}, "data has 0 samples; expected at least 1 to train on"),
    "data None": ({"data": None}, "data is None; expected a torch Dataset"),
    "data of no length": ({"data": NoLength()}, "data is a NoLength; expected a torch Dataset"),
    "data of no rows": ({"data": TensorDataset(torch.zeros(0, 6))}, "data has 0 samples"),
    "data of a loader": ({"data": DataLoader(Numbers())}, "data is a DataLoader, but the trainer"),
    "validation": ({"validation": []}, "validation has 0 samples; expected at least 1 to measure"),
    "stream": ({"data": OnlyOnce()}, "give shuffle=False and steps=N"),
}
"""What is refused as it is said."""

AT_FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "build None": ({"build": none}, "build returns None; expected a torch.nn.Module"),
    "no parameters": ({"build": NoParameters}, "the NoParameters that build returns has no param"),
    "all frozen": ({"build": frozen}, "has 6 parameters, all frozen"),
    "optimizer of None": ({"optimizer": none}, "optimizer returns None; expected a torch.optim"),
    "optimizer of another": ({"optimizer": of_another}, "updates a parameter of shape (2, 2)"),
    "lbfgs": ({"optimizer": lbfgs}, "a step of LBFGS needs a closure, which the trainer does not"),
    "adafactor": ({"optimizer": adafactor}, "Adafactor keeps a row_var of shape [3, 1]"),
    "scheduler of None": ({"scheduler": none}, "scheduler returns None, without step"),
    "plateau": ({"scheduler": on_plateau}, "a step of ReduceLROnPlateau needs metrics"),
    "scheduler of another": ({"scheduler": of_another_optimizer}, "belongs to another optimizer"),
    "scheduler of sets": ({"scheduler": of_sets}, "cannot save the state of StepLR"),
    "no graph": ({"objective": NoGraph()}, "Objective.loss_sum: the loss has no graph"),
    "count None": (
        {"objective": Counting(None)},
        "num_valid: the count is None; expected how many",
    ),
    "count nan": ({"objective": Counting(float("nan"))}, "num_valid: the count is nan"),
    "count of two": ({"objective": Counting(torch.ones(2))}, "is a tensor of shape [2]"),
    "count -1": ({"objective": Counting(-1)}, "num_valid: the count is -1"),
}
"""What is refused before the first step."""

SPLIT: dict[str, tuple[dict[str, Any], str]] = {
    "rprop": ({"optimizer": rprop}, "phalanx.Trainer: Rprop does not support sharded parameters"),
    "adafactor": ({"optimizer": adafactor}, "Adafactor does not support sharded parameters"),
    "lbfgs": ({"optimizer": lbfgs}, "a step of LBFGS needs a closure"),
}
"""What is refused before the first step where parameters are split."""

STAGED: dict[str, tuple[dict[str, Any], str]] = {
    "gradient within": ({"objective": OnMovedInputs()}, "computes a gradient through Sequential"),
}
"""What is refused before the first step of a pipeline."""


def trainer(changes: dict[str, Any]) -> phalanx.Trainer:
    usual = {"build": perceptron_of_doubles, "objective": Classes(), "data": Numbers()}
    return phalanx.Trainer(**{**usual, "batch_size": 8, "steps": 1, **changes})


def _job(changes: dict[str, Any]) -> Callable[[], phalanx.Trainer]:
    return lambda: trainer(changes)


def name_of(case: str) -> str:
    return "job_" + "".join(each if each.isalnum() else "_" for each in case)


# Functions without arguments, as the command line names them.
globals().update({
    name_of(case): _job(changes)
    for case, (changes, _) in (AT_ONCE | AT_FIRST | SPLIT | STAGED).items()
})  # fmt: skip
