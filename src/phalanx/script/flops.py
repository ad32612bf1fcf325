"""The FLOPs of a module of any kind, counted by running it on shapes alone."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.data.rows import map_tensors
from phalanx.train.objective import Objective


def flops_of(model: nn.Module, objective: Objective, batch: Any) -> int | None:
    """Return the FLOPs of forward and backward of a batch; None if they cannot be counted.

    A copy of the model on the meta device runs, which computes nothing. Matrix products,
    convolutions and attention count, 2 a multiply-add, as PyTorch's FlopCounterMode counts them.

    Args:
        model: as it was built, not split yet.
        objective: of its loss.
        batch: a batch of it.
    """
    try:
        shapes = copy.deepcopy(model).to("meta")
        on_meta = map_tensors(batch, lambda tensor: tensor.to("meta"))
        with FlopCounterMode(display=False) as counter:
            objective.loss_sum(shapes, on_meta, 0).backward()
    except Exception:  # whatever a module does with numbers, which there are none of
        return None
    return counter.get_total_flops() or None
