"""Refuse what a model that fsdp has split cannot do: copies and second derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from phalanx.errors import StrategyError


def refuse_copy(module: nn.Module, _memo: object) -> nn.Module:
    """Raise a StrategyError, in place of a copy of a split module."""
    name = type(module).__name__.removeprefix("FSDP")
    raise StrategyError(
        f"fsdp: a {name} that is split cannot be copied; average its weights by "
        "run.average(decay), take full weights from run.state_dict(), or use dp"
    )


def refuse_second_derivative(_model: nn.Module, _inputs: Any, output: Any) -> None:
    """Add hooks that refuse a backward with create_graph=True through the model."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(_check_order)


def _check_order(_grad: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # in backward this holds only with create_graph=True
        raise StrategyError(
            "fsdp: a gradient is computed with create_graph=True, as for a gradient penalty; "
            "its derivative needs weights that fsdp has freed by then; use dp"
        )
