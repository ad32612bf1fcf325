"""Views that a group of fsdp returns, and that are written in place afterwards.

FSDP2 gathers a group for its backward by a hook on what the group returns. Autograd drops the hook
of a view that is written in place, as by `x = block(x); x += y`; FSDP2 warns of every view, and
without the hook the backward would run on weights that are freed. The tensor that the view is of
keeps the node by which it was made: there the group is gathered if the hook has not run.

    block ---> base ---view---> x ---x += y---> loss      the hook on x is dropped,
                 |<------------CopySlices---------|       and the node of base comes in any case
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
    """Have a group's outputs be written in place, views or not; once FSDP2 has split the group."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # Private, and what the hook of FSDP2 runs; tests/script/test_own_loop.py pins both.
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
