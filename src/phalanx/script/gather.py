"""Gather the rows of a batch from all ranks in the order of one process; sum over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.untrusted import brief
from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.data.rows import map_batch, tensors_of
from phalanx.errors import ScriptError
from phalanx.script.drift import first_unequal_rank
from phalanx.script.mean_loss import MeanLoss, MeanNumber

T = TypeVar("T")


def gather_rows(
    batch: Any, comm: Comm, num_rows: Collection[int], is_check_due: bool
) -> tuple[Any, bool]:
    """Return the rows of all ranks, see `Run.gather`, and whether any rank needs a check.

    `num_rows` are the numbers of this rank's rows in the last batch of each loader.

    Raises:
        ScriptError: a tensor has no row dimension, or other numbers of rows than these batches.
    """
    own = map_batch(batch, lambda tensor: tensor.detach().cpu())
    _check_rows(tensors_of(own), num_rows)
    # Ranks with equal data coordinates, such as tp ranks, have the same rows: use one of them.
    parts = gather_objects((comm.coord("data"), own, is_check_due))
    by_rank = {number: tensors_of(part) for number, part, _ in parts}
    pieces = [by_rank[number] for number in sorted(by_rank)]
    wholes = iter([_rows_of_all(each) for each in _together(pieces)])
    return map_batch(own, lambda _: next(wholes)), any(is_due for *_, is_due in parts)


def gather_with_gradient(batch: Any, comm: Comm, num_rows: Collection[int]) -> Any:
    """Return the rows of all ranks; gradients flow back to the rank that each row came from."""
    own = tensors_of(map_batch(batch, lambda tensor: tensor))  # map_batch refuses other values
    _check_rows(own, num_rows)
    rows = gather_objects((comm.coord("data"), [tuple(tensor.shape) for tensor in own]))
    shapes = [shape for _, shape in sorted(dict(rows).items())]
    wholes: list[Tensor] = []
    for tensor, of_ranks in zip(own, _together(shapes), strict=True):
        filled = [shape for shape in of_ranks if shape[0]] or [tuple(tensor.shape)]
        _check_shapes(filled)
        counts = [shape[0] for shape in of_ranks]
        begin = sum(counts[: comm.coord("data")])
        shape = (sum(counts), *filled[0][1:])
        wholes.append(_RowsOfAll.apply(tensor, comm, begin, shape))  # pyright: ignore
    found = iter(wholes)
    return map_batch(batch, lambda _: next(found))


def _together(of_ranks: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    """Return, for each position in a batch, the values of all ranks."""
    if len(numbers := {len(each) for each in of_ranks}) > 1:
        raise ScriptError(
            f"gather: the ranks give {' and '.join(map(str, sorted(numbers)))} tensors; give the "
            "same number on every rank"
        )
    return list(zip(*of_ranks, strict=True))


class _RowsOfAll(torch.autograd.Function):
    """All-gather of rows over `data`; backward sums the gradient of each row over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, comm: Comm, begin: int, shape: tuple[int, ...]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.comm, ctx.rows, ctx.shape = comm, slice(begin, begin + len(own)), own.shape
        whole = torch.zeros(shape, dtype=own.dtype, device=own.device)
        if len(own):  # an empty tensor may have another padded length than the others
            whole[ctx.rows] = own
        if own.dtype == torch.bool:
            return comm.all_reduce(whole.byte(), "data").bool()
        return comm.all_reduce(whole, "data")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = ctx.comm.all_reduce(grad.clone(), "data")[ctx.rows]
        return own.reshape(ctx.shape), None, None, None


def _check_rows(own: Sequence[Tensor], num_rows: Collection[int]) -> None:
    if any(tensor.ndim == 0 for tensor in own):
        raise ScriptError(
            "gather: a tensor has no rows; give one number for each sample, or use run.sum"
        )
    rows = {len(tensor) for tensor in own}
    if num_rows and rows.difference(num_rows):
        has = " or ".join(map(str, sorted(num_rows)))
        raise ScriptError(
            f"gather: the tensors have {sorted(rows)} rows, but the last batch that this rank has "
            f"read has {has}; call it for each batch, which keeps the order of one process, and "
            "concatenate the results"
        )


def _rows_of_all(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all ranks in rank order; skip empty tensors."""
    filled = [piece for piece in pieces if len(piece)] or list(pieces[:1])
    _check_shapes([tuple(piece.shape) for piece in filled])
    return torch.cat(filled)


def _check_shapes(shapes: Sequence[tuple[int, ...]]) -> None:
    unlike = {shape[1:] for shape in shapes}
    if len(unlike) > 1:
        raise ScriptError(
            f"gather: the rows have different shapes on different ranks, {sorted(unlike)}; pad "
            "them to one length, the same on all ranks"
        )


def add_up(
    call: str, numbers: Sequence[Tensor], comm: Comm, is_check_due: bool
) -> tuple[Tensor, bool]:
    """Return the sums of numbers over the data ranks, and whether any rank needs a check.

    Sums are float64, or int64 if all ranks give integers; every rank calls this together.
    """
    own = torch.stack(torch.broadcast_tensors(*numbers))
    shape = tuple(own.shape[1:])
    form = zlib.crc32(repr(shape).encode())
    # A rank without rows may have the integer 0 where other ranks have a float.
    asks = [own.is_floating_point(), is_check_due, form, -form]
    asks = comm.all_reduce(torch.tensor(asks, device=own.device), "job", "max")
    is_float, is_due, largest, smallest = asks.tolist()
    if largest != -smallest:
        shapes = gather_objects(shape)
        odd = first_unequal_rank(shapes) or 0
        raise ScriptError(
            f"{call}: the numbers have the shape {shapes[odd]} on rank {odd} and {shapes[0]} "
            "on rank 0; give numbers of one shape on every rank"
        )
    total = own.to(torch.float64 if is_float else torch.int64)  # a copy, made by stack
    return comm.all_reduce(total, "data"), bool(is_due)


def own_number(call: str, value: Any, comm: Comm) -> Tensor:
    """Return a number or tensor of this rank on its device, to be summed over the ranks."""
    if isinstance(value, MeanLoss | MeanNumber):
        raise ScriptError(
            f"{call}: the loss that run.backward returned is the mean over all ranks already; give "
            "a number of this rank only, such as the loss_sum that was given to run.backward"
        )
    try:
        # Through numpy, because torch converts a Python float to float32.
        own = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        return own.detach().to(comm.device)
    except (TypeError, ValueError, RuntimeError):
        raise ScriptError(
            f"{call}: {brief(value)} is not a number; expected a number or a tensor of this rank"
        ) from None
