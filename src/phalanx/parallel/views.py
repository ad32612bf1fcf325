"""Gather an fsdp group for its backward, whatever its forward returns.

FSDP2 gathers a group for its backward in a hook on the output of the group. If the output is a view
and is written in place, as by `x = block(x); x += y`, autograd drops the hook, and backward would
run on freed weights. FSDP2 therefore warns of every view. The base tensor of the view keeps the
autograd node that made it, so a prehook on that node gathers the group if the hook has not run.
FSDP2 also finds no tensor in an object that pytree does not know; `tensors_within` does.

    block ---> base ---view---> x ---x += y---> loss      the hook on x is dropped,
                 |<------------CopySlices---------|       but backward always runs the node of base
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

_ATOMS = str | bytes | bool | int | float | type | torch.dtype | torch.device | nn.Module


def allow_outputs(module: FSDPModule) -> None:
    """Allow in-place writes to a group's outputs and tensors within any objects.

    Call it after `fully_shard`.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # Private, as is the function that FSDP2's hook runs; tests/script/test_own_loop.py pins both.
    state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    assert isinstance(module, nn.Module)
    module.register_forward_hook(functools.partial(_watch, state))


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors in a value, also those in attributes of its objects."""
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        each = left.pop()
        if each is None or isinstance(each, _ATOMS) or id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            continue
        if isinstance(each, Mapping):
            left += cast("Mapping[Any, Any]", each).values()
        elif isinstance(each, Collection):
            left += cast("Collection[Any]", each)
        slots = [getattr(kind, "__slots__", ()) for kind in type(each).__mro__]
        names = [name for slot in slots for name in ([slot] if isinstance(slot, str) else slot)]
        left += [getattr(each, name, None) for name in names]
        left += getattr(each, "__dict__", {}).values()
    return [each for each in seen.values() if isinstance(each, Tensor)]


def _watch(state: Any, _module: nn.Module, _inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    tensors: list[Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            continue
        for tensor in tensors_within(leaf):
            tensors.append(tensor)
            if tensor.requires_grad:
                tensor.register_hook(state._pre_backward)
    for tensor in tensors:
        if not tensor.requires_grad:
            continue
        base = tensor._base  # pyright: ignore[reportPrivateUsage]
        if base is None or base.grad_fn is None:
            continue
        gathered: list[bool] = []
        tensor.register_hook(functools.partial(_note, gathered))
        base.grad_fn.register_prehook(functools.partial(_gather, state, gathered))


def _note(gathered: list[bool], _gradient: Tensor) -> None:
    gathered.append(True)


def _gather(state: Any, gathered: list[bool], _gradients: Any) -> None:
    if not gathered:
        state._pre_backward(None)
