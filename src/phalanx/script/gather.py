"""Gather the rows of a batch from all ranks, in the order of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.data.rows import map_batch, tensors_of
from phalanx.errors import ScriptError


def gather_rows(
    batch: Any, comm: Comm, num_rows: int | None, is_check_due: bool
) -> tuple[Any, bool]:
    """Return the rows of all ranks, see `Run.gather`, and whether a check is due on any.

    Args:
        batch: this rank's rows.
        comm: the ranks.
        num_rows: of this rank in the batch that it has read last; None if it has read none.
        is_check_due: whether one is due on this rank.

    Raises:
        ScriptError: a tensor has no rows, or other rows than the batch.
    """
    own = map_batch(batch, lambda tensor: tensor.detach().cpu())
    if any(tensor.ndim == 0 for tensor in tensors_of(own)):
        raise ScriptError(
            "gather: a tensor has no rows; give one number for each sample, or use run.sum"
        )
    rows = {len(tensor) for tensor in tensors_of(own)}
    if num_rows is not None and rows - {num_rows}:
        raise ScriptError(
            f"gather: {sorted(rows)} rows, while the batch that this rank has read last has "
            f"{num_rows}; call it for each batch, which keeps the order of one "
            "process, and put those results together"
        )
    # Ranks that differ on tp alone have the same rows.
    parts = gather_objects((comm.coord("data"), own, is_check_due))
    by_rank = {number: tensors_of(part) for number, part, _ in parts}
    pieces = [by_rank[number] for number in sorted(by_rank)]
    wholes = iter([_rows_of_all(each) for each in zip(*pieces, strict=True)])
    return map_batch(own, lambda _: next(wholes)), any(is_due for *_, is_due in parts)


def _rows_of_all(pieces: Sequence[Tensor]) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks."""
    filled = [piece for piece in pieces if len(piece)] or list(pieces[:1])
    shapes = {tuple(piece.shape[1:]) for piece in filled}
    if len(shapes) > 1:
        raise ScriptError(
            f"gather: the rows of ranks have unlike shapes, {sorted(shapes)}; pad them to one "
            "length, the same on all ranks"
        )
    return torch.cat(filled)
