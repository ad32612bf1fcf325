"""Numbers of each rank, added up over the ranks: `run.sum` and `run.mean`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.foreign import brief
from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.script.mean_loss import MeanLoss, MeanNumber


def add_up(
    call: str, numbers: Sequence[Tensor], comm: Comm, is_check_due: bool
) -> tuple[Tensor, bool]:
    """Return the sums of numbers over the data ranks, and whether a check is due on any rank.

    They are float64, or int64 where all ranks give whole numbers; every rank calls this together.

    Raises:
        ScriptError: a rank gives numbers of another shape.
    """
    own = torch.stack(torch.broadcast_tensors(*numbers))
    shape = tuple(own.shape[1:])
    form = zlib.crc32(repr(shape).encode())
    # A rank without rows may have the integer 0 where others have a number.
    asks = [own.is_floating_point(), is_check_due, form, -form]
    asks = comm.all_reduce(torch.tensor(asks, device=own.device), "job", "max")
    is_float, is_due, largest, smallest = asks.tolist()
    if largest != -smallest:
        shapes = gather_objects(shape)
        odd = next(rank for rank, each in enumerate(shapes) if each != shapes[0])
        raise ScriptError(
            f"{call}: the numbers have the shape {shapes[odd]} on rank {odd} and {shapes[0]} "
            "on rank 0; give numbers of one shape on every rank"
        )
    total = own.to(torch.float64 if is_float else torch.int64)  # stack has copied them
    return comm.all_reduce(total, "data"), bool(is_due)


def own_number(call: str, value: Any, comm: Comm) -> Tensor:
    """Return numbers of this rank, to be added up over the ranks, on its device.

    Raises:
        ScriptError: it is no number, or the loss of all ranks.
    """
    if isinstance(value, MeanLoss | MeanNumber):
        raise ScriptError(
            f"{call}: the loss that run.backward returned is of all ranks already; add up what "
            "this rank alone has, such as the loss_sum that run.backward was given"
        )
    try:
        # numpy, since torch makes a float a float32
        own = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        return own.detach().to(comm.device)
    except (TypeError, ValueError, RuntimeError):
        raise ScriptError(
            f"{call}: {brief(value)} is no number; expected a number or a tensor of this rank"
        ) from None
