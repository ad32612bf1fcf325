"""The gradient of an embedding table, with only the rows that a batch has looked up.

It is a coalesced sparse tensor of torch. A message represents it by two flat tensors: the ascending
indices of the rows on the receiving server, and the concatenated rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sparse_of(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a coalesced sparse tensor of a table's shape with `values` in `rows`.

    Raises:
        ValueError: `rows` are not ascending row indices of the table, or `values` has another size.
    """
    num_rows, width = shape
    in_table = not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < num_rows)
    if rows.dtype != torch.int64 or not in_table or not bool((rows.diff() > 0).all()):
        raise ValueError(f"rows of a table are not ascending numbers from 0 to {num_rows - 1}")
    if values.numel() != len(rows) * width:
        raise ValueError(f"{values.numel()} values; expected {len(rows)} rows of {width}")
    return torch.sparse_coo_tensor(
        rows[None], values.view(-1, width), (num_rows, width), is_coalesced=True,
        check_invariants=False,
    )  # fmt: skip


def flat_parts(tensor: Tensor) -> list[Tensor]:
    """Return the flat tensors of a message for `tensor`: itself, or rows and values if sparse."""
    if not tensor.is_sparse:
        return [tensor]
    return [tensor.indices()[0].contiguous(), tensor.values().reshape(-1)]
