"""Rows of all ranks, in the order of one process, with gradient; and sums over ranks.

    z, y = run.gather(model(x), y)         every rank has the rows of the whole batch
    run.backward(criterion(z, y))          every rank computes the same loss from them

    rows of this rank --- gather --> rows of all ranks --> loss        each rank computes all of it
    their gradient   <--- slice ---- gradient of all rows <-- 1        equal on all ranks: each
                                                                       takes its slice

For a loss of the whole batch a slice sends nothing, so ranks that use different gathers do not wait
for one another. Slice and gather are each other's backward, so gradients can be differentiated
again. `Gathers.passing` says how `run.backward` passes gradients; elsewhere, as in
`torch.autograd.grad`, a row's gradient passes unchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from phalanx.checkpoint.untrusted import brief
from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.data.rows import map_tensors, tensors_of
from phalanx.errors import PhalanxError, ScriptError
from phalanx.script.checksums import first_unequal_rank


class Gathers:
    """The gathers of a run, and how gradients pass them.

    Attributes:
        scale: factor from a gradient of all rows to the gradient of this rank's rows.
        has_graph: whether rows were gathered with a graph since it was last set to False.
    """

    def __init__(self, comm: Comm) -> None:
        """Gather over the data ranks of `comm`."""
        self._comm, self._has_own_groups = comm, False
        self.scale, self._is_summed, self.is_cut = 1.0, False, False
        self.has_graph = False

    @contextmanager
    def passing(
        self, scale: float = 1.0, *, is_summed: bool = False, is_cut: bool = False
    ) -> Generator[None]:
        """Say how gradients pass within this context.

        Args:
            scale: see the attribute; not 1 for the gradients of a loss divided by `scale`.
            is_summed: whether losses of ranks differ, so a row's gradient is the sum over ranks.
            is_cut: whether no gradient passes, so that gradients of a rank's own terms remain.
        """
        self.scale, self._is_summed, self.is_cut = scale, is_summed, is_cut
        try:
            yield
        finally:
            self.scale, self._is_summed, self.is_cut = 1.0, False, False

    def gather(
        self,
        batch: Any,
        num_rows: Collection[int],
        *,
        dim: int | None,
        pad: float | None,
        per_row: int,
        is_check_due: bool,
    ) -> tuple[Any, bool]:
        """Return the rows of all ranks, see `Run.gather`, and whether any rank needs a check.

        `num_rows` are the numbers of this rank's rows in the last batch of each loader; empty if
        the script reads no prepared loader.
        """
        own: list[Tensor] = []
        forms: Any = None
        try:
            own = [_rows_first(each, dim) for each in tensors_of(_without_caches(batch))]
            forms = [_form(each, num_rows, per_row) for each in own]
        except PhalanxError as error:  # all ranks raise it: none waits for the others
            forms = str(error)
        if not self._has_own_groups:
            # Backward within `summed` has no fixed order relative to the sums of gradients.
            self._comm, self._has_own_groups = self._comm.with_separate_groups("data"), True
        of_ranks, is_due = self._forms_of_ranks(forms, is_check_due)
        if len(numbers := {len(theirs) for theirs in of_ranks}) > 1:
            raise ScriptError(
                f"gather: the ranks give {' and '.join(map(str, sorted(numbers)))} tensors; give "
                "the same number on every rank"
            )
        wholes: list[Tensor] = []
        for tensor, shapes in zip(own, zip(*of_ranks, strict=True), strict=True):
            whole = self._gathered(tensor, _common_shape(shapes, pad), [s[0] for s in shapes], pad)
            wholes.append(whole.movedim(0, dim) if dim else whole)
        found = iter(wholes)
        whole = map_tensors(_without_caches(batch), lambda _: next(found))
        return whole, is_due

    def _forms_of_ranks(self, forms: Any, is_check_due: bool) -> tuple[list[list[_Form]], bool]:
        """Return the forms that each data rank gathers, and whether any rank needs a check.

        In most calls they differ in lengths alone, so numbers suffice. Else, or if a rank has an
        error, objects are exchanged, which takes several times as long.
        """
        comm, coord = self._comm, self._comm.coord("data")
        is_short = not isinstance(forms, str) and len(forms) <= _MOST_LENGTHS
        alike = zlib.crc32(repr([form[1:] for form in forms] if is_short else "").encode())
        # Ranks with equal data coordinates, such as tp ranks, have the same rows.
        table = torch.zeros((comm.size("data"), 3 + _MOST_LENGTHS), dtype=torch.int64)
        own = [not is_short, is_check_due, alike, *(form[0] for form in forms if is_short)]
        table[coord, : len(own)] = torch.tensor(own)
        table = comm.all_reduce(table.to(comm.device), "job", "max").tolist()
        is_due = any(row[1] for row in table)
        if is_short and all(row[0] == 0 and row[2] == alike for row in table):
            own_forms = cast("list[_Form]", forms)
            return [
                [(n, *form[1:]) for n, form in zip(row[3:], own_forms, strict=False)]
                for row in table
            ], is_due
        every = gather_objects((coord, forms))
        for rank, (_, theirs) in enumerate(every):
            if isinstance(theirs, str):
                raise ScriptError(theirs if theirs == forms else f"rank {rank}: {theirs}")
        by_coord: dict[int, Any] = dict(every)
        return [by_coord[coord] for coord in sorted(by_coord)], is_due

    def _gathered(
        self, own: Tensor, shape: tuple[int, ...], counts: Sequence[int], pad: float | None
    ) -> Tensor:
        """Return the rows of all ranks; `counts` are their numbers, `shape` the shape of a row."""
        own = own[: counts[self._comm.coord("data")]]  # without spare rows of a rank without rows
        if not len(own):  # may have another length than the others
            own = own.reshape(0, *shape)
        elif tuple(own.shape[1:]) != shape:
            missing = [n - m for n, m in zip(shape, own.shape[1:], strict=True)]
            own = pad_tensor(own, [w for n in reversed(missing) for w in (0, n)], value=pad)
        whole = cast(Tensor, _Gather.apply(own, self, counts))  # pyright: ignore[reportUnknownMemberType]
        self.has_graph |= whole.requires_grad
        return whole

    def _begin(self, counts: Sequence[int]) -> int:
        return sum(counts[: self._comm.coord("data")])

    def collect(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks without gradient."""
        if self._comm.size("data") == 1:
            return own.clone()
        most = max(counts)
        whole = own.new_zeros((most, *own.shape[1:]))
        whole[: len(own)] = own
        is_bool = whole.dtype == torch.bool
        whole = whole.view(torch.uint8) if is_bool else whole
        for axis in reversed(self._comm.axes_of("data")):
            whole = self._comm.all_gather(whole, axis, 0)
        whole = whole.view(torch.bool) if is_bool else whole
        if min(counts) == most:
            # Not a view of what was received, which autograd would not let a script write into.
            return whole.new_empty(0).set_(cast("Any", whole))
        pieces = whole.unflatten(0, (len(counts), most)).unbind()
        return torch.cat([piece[:n] for piece, n in zip(pieces, counts, strict=True)])

    def slice(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the gradient of this rank's rows from the gradient of all rows."""
        if self._is_summed and self._comm.size("data") > 1:
            whole = self._comm.all_reduce(whole.clone(), "data")
        begin = self._begin(counts)
        own = whole[begin : begin + counts[self._comm.coord("data")]]
        return own.clone() if self.scale == 1 else own * self.scale


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, gathers: Gathers, counts: Sequence[int]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gathers, ctx.counts = gathers, counts
        return gathers.collect(own, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gathers: Gathers = ctx.gathers
        return (None if gathers.is_cut else _Slice.apply(grad, gathers, ctx.counts)), None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, gathers: Gathers, counts: Sequence[int]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gathers, ctx.counts = gathers, counts
        return gathers.slice(whole, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gathers: Gathers = ctx.gathers
        whole = cast(Tensor, _Gather.apply(grad, gathers, ctx.counts))  # pyright: ignore[reportUnknownMemberType]
        return whole / gathers.scale, None, None


def is_gather(node: Any) -> bool:
    """Return whether a node of an autograd graph is the backward of a gather."""
    return issubclass(type(node), _Gather._backward_cls)  # pyright: ignore


def _without_caches(batch: Any) -> Any:
    """Return a batch without objects that are no rows, such as the key-value cache of a model."""
    return map_tensors(batch, lambda tensor: tensor, _plain_or_none)


def _plain_or_none(value: Any) -> Any:
    return value if isinstance(value, str | int | float | complex) else None


def _rows_first(tensor: Tensor, dim: int | None) -> Tensor:
    """Return a tensor with its row dimension in front."""
    if tensor.ndim == 0:
        raise ScriptError(
            "gather: a tensor has no rows, as the loss that a model returns beside its logits; "
            "gather tensors with a row for each sample, such as out.logits, and compute the number "
            "from the gathered rows"
        )
    if tensor.requires_grad and len(tensor) > 1 and tensor.stride(0) == 0:
        raise ScriptError(
            f"gather: a tensor of shape {tuple(tensor.shape)} is a number of this rank's rows, "
            "expanded to them, and no number of the whole batch; gather the rows that it was "
            "computed from, and compute it from them"
        )
    if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
        raise ScriptError(
            f"gather: dim is {dim}, but a tensor has the shape {tuple(tensor.shape)}; expected the "
            f"dimension of its rows, 0 to {tensor.ndim - 1}"
        )
    return tensor.movedim(dim, 0) if dim else tensor


_Form = tuple[int, tuple[int, ...], str]
"""Entries of a tensor, shape of an entry, and dtype."""

_MOST_LENGTHS: Final = 13
"""Tensors whose lengths ranks exchange as numbers."""


def _form(tensor: Tensor, num_rows: Collection[int], per_row: int) -> _Form:
    """Return the form of a tensor; refuse one whose first dimension is no rows of a batch."""
    length, shape, dtype = len(tensor), tuple(tensor.shape[1:]), str(tensor.dtype)
    is_whole = length % per_row == 0 and length // per_row in num_rows
    if 0 in num_rows and not is_whole and length == per_row > 1:
        length = 0  # entries of the spare row that the model has computed in place of none
    if not num_rows or length in num_rows or is_whole:
        return length, shape, dtype
    has = " or ".join(map(str, sorted(num_rows)))
    raise ScriptError(
        f"gather: a tensor of shape {tuple(tensor.shape)} has {length} entries in its first "
        f"dimension, but the last batch that this rank has read has {has} rows; gather each batch "
        "before tensors are concatenated, which keeps the order of one process; or name the "
        "dimension of the rows, as in run.gather(out, dim=1), or the number of consecutive entries "
        "of a row, as in run.gather(out, per_row=128)"
    )


def _common_shape(forms: Sequence[_Form], pad: float | None) -> tuple[int, ...]:
    """Return the shape of a row on all ranks, the largest if rows are padded."""
    filled = [form for form in forms if form[0]] or forms[:1]
    if len(dtypes := {form[2] for form in forms}) > 1:
        raise ScriptError(
            f"gather: a tensor is {' and '.join(sorted(dtypes))} on different ranks; give the same "
            "type on every rank"
        )
    shapes = {form[1] for form in filled}
    if len(shapes) > 1 and (pad is None or len({len(shape) for shape in shapes}) > 1):
        raise ScriptError(
            f"gather: the rows have different shapes on different ranks, {sorted(shapes)}; pad "
            "them to the longest of all ranks, as in run.gather(out, pad=0)"
        )
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


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
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ScriptError(
            f"{call}: the number has a graph, and no gradient passes a sum over the ranks; for a "
            "loss gather the rows and compute the number from them: out, y = run.gather(model(x), "
            f"y); for a log write run.{call}(value.detach())"
        )
    try:
        # Through numpy, because torch converts a Python float to float32.
        own = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        return own.detach().to(comm.device)
    except (TypeError, ValueError, RuntimeError):
        raise ScriptError(
            f"{call}: {brief(value)} is not a number; expected a number or a tensor of this rank"
        ) from None
