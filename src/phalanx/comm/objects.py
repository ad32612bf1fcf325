"""Pass Python values between ranks: small ones, such as who holds what and what went wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather_objects(value: Any) -> list[Any]:
    """Return the `value` (anything that can be pickled) of each rank, in the order of the ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_object(value: Any) -> Any:
    """Return the `value` of the first rank of the job that has one, on every rank; else None.

    Where no rank has one, only a number is reduced, so that asking costs little on many ranks.

    Args:
        value: this rank's: None, or anything that can be pickled.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    first = torch.tensor(num_ranks if value is None else rank, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if int(first) == num_ranks:
        return None
    values = [value]
    dist.broadcast_object_list(values, src=int(first))
    return values[0]
