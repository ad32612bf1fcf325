"""Pass Python values between ranks: small ones, such as who holds what and what went wrong."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the `value` (anything that can be pickled) of each rank, in the order of the ranks.

    Args:
        value: this rank's.
        group: its ranks take part; those of the whole job if None.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
