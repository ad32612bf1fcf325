"""Support in-place writes to views that an fsdp group returns.

FSDP2 gathers a group for its backward in a hook on the output of the group. If the output is a view
and is written in place, as by `x = block(x); x += y`, autograd drops the hook, and backward would
run on freed weights. FSDP2 therefore warns of every view. The base tensor of the view keeps the
autograd node that made it, so a prehook on that node gathers the group if the hook has not run.

    block ---> base ---view---> x ---x += y---> loss      the hook on x is dropped,
                 |<------------CopySlices---------|       but backward always runs the node of base
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves


def allow_views(module: FSDPModule) -> None:
    """Allow in-place writes to a group's outputs, even views; call it after `fully_shard`."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # Private, as is the function that FSDP2's hook runs; tests/script/test_own_loop.py pins both.
    state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    assert isinstance(module, nn.Module)
    module.register_forward_hook(functools.partial(_watch_bases, state))


def _watch_bases(state: Any, _module: nn.Module, _inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    for tensor in tree_leaves(output):
        base = tensor._base if isinstance(tensor, Tensor) and tensor.requires_grad else None  # pyright: ignore[reportPrivateUsage]
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
