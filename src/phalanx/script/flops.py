"""The FLOPs of a module of any kind, counted by running it on shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.data.rows import count_rows, map_tensors, tensors_of
from phalanx.parallel.skeleton import copied_on_meta
from phalanx.train.objective import Objective


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of forward and backward of a batch.

    Attributes:
        total: of the model.
        of_module: of each module in it, by its name.
        num_rows: of the batch.
        row_shapes: of a row in each of its tensors.
    """

    total: int
    of_module: Mapping[str, int]
    num_rows: int
    row_shapes: tuple[torch.Size, ...]


def row_shapes(batch: Any) -> tuple[torch.Size, ...]:
    """Return the shape of a row in each tensor of a batch."""
    return tuple(tensor.shape[1:] for tensor in tensors_of(batch))


def flops_of(model: nn.Module, objective: Objective, batch: Any) -> Flops | None:
    """Return the FLOPs of forward and backward of a batch; None if they cannot be counted.

    Copies of the model and of the objective run on the meta device, and compute nothing. Matrix
    products, convolutions and attention count, 2 a multiply-add, as PyTorch's FlopCounterMode
    counts them.

    Args:
        model: as it was built, not split yet.
        objective: of its loss.
        batch: a batch of it.
    """
    try:
        # An objective that keeps a state, as a count of its calls, is not to see this one.
        shapes, of_shapes = copied_on_meta((model, objective))
        rows = map_tensors(batch, lambda tensor: tensor.to("meta"))
        with FlopCounterMode(display=False) as counter:
            of_shapes.loss_sum(shapes, rows, 0).backward()
    except Exception:  # whatever a module does with numbers, which there are none of
        return None
    # Its names begin with the class of the model.
    counted = {
        name.partition(".")[2]: sum(of_kinds.values())
        for name, of_kinds in counter.get_flop_counts().items()
        if "." in name
    }
    total = counter.get_total_flops()
    return Flops(total, counted, count_rows(batch), row_shapes(batch)) if total else None
