"""The mean loss over all ranks that `run.backward` returns, with the count of its samples.

    total += loss.item() * loss.count        the sum of the losses of all ranks
    total += loss.item() * len(y)            an error: `len(y)` counts the rows of this rank alone

A loop on one process multiplies each mean by the rows of its batch. On several ranks the mean is
over more rows than this rank has, and the product would be a half, a quarter, ... of the sum. So
the product with a count of this rank is refused. In other operations the loss is a plain number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ScriptError

_PRODUCTS: Final = frozenset({
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul, Tensor.mul_, torch.mul),
    *(Tensor.multiply, Tensor.multiply_, torch.multiply),
})  # fmt: skip
"""Torch functions that multiply two operands."""

_SAME: Final = frozenset({
    *(Tensor.detach, torch.detach, Tensor.clone, torch.clone, Tensor.cpu, Tensor.cuda, Tensor.to),
    *(Tensor.float, Tensor.double, Tensor.mean, torch.mean, cast(Any, Tensor.data).__get__),
})  # fmt: skip
"""Torch functions that keep the value of a tensor of one element."""


_Counts = tuple[float, tuple[float, ...]]
"""Count of a mean over all ranks, and counts of this rank that must not be a factor of it."""


class MeanLoss(Tensor):
    """The mean loss over the microbatch of all ranks; 0-d, float64, without a graph.

    Attributes:
        of_step: mean over all microbatches of the step so far; 0-d, float64.
        on_count: callback that runs when `count` is read.
    """

    of_step: Tensor
    on_count: Callable[[], None]
    _count: Tensor
    _own: tuple[Any, ...]

    @staticmethod
    def of(mean: Tensor, of_step: Tensor, count: Tensor, own: Sequence[float | Tensor]) -> MeanLoss:
        """Return `mean` as a `MeanLoss`.

        `count` is the number of samples or tokens of all ranks; `own` are this rank's counts.
        """
        loss = mean.as_subclass(MeanLoss)
        loss.of_step, loss._count, loss._own = of_step, count, tuple(own)
        loss.on_count = lambda: None
        return loss

    @property
    def count(self) -> int | float:
        """Number of samples or tokens, on all ranks, in the mean."""
        self.on_count()
        count = float(self._count)
        return int(count) if count.is_integer() else count

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the torch function; refuse a product with a count of this rank."""
        given = [*args, *(kwargs or {}).values()]
        losses = [each for each in given if isinstance(each, MeanLoss)]
        if func in _PRODUCTS:
            for loss in losses:
                _refuse(next((each for each in given if each is not loss), None), loss._counts())
        # As in PyTorch's notes on extending torch.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **(kwargs or {}))
        if func is Tensor.item:
            return MeanNumber(result, losses[0]._counts())
        if func in _SAME and isinstance(result, Tensor) and losses:
            kept = losses[0]
            same = MeanLoss.of(result, kept.of_step, kept._count, kept._own)
            same.on_count = kept.on_count
            return same
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.as_subclass(Tensor))

    def __format__(self, format_spec: str) -> str:
        return format(self.as_subclass(Tensor), format_spec)

    def __reduce_ex__(self, proto: Any) -> Any:  # so that loading needs no Phalanx
        return self.as_subclass(Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def _counts(self) -> _Counts:
        return float(self._count), tuple(float(each) for each in self._own)


class MeanNumber(float):
    """The value of a `MeanLoss` as a float that refuses the same products."""

    _counts: _Counts

    def __new__(cls, value: float, counts: _Counts) -> MeanNumber:
        """Return the number with `counts`, see `_Counts`."""
        number = super().__new__(cls, value)
        number._counts = counts
        return number

    def __mul__(self, other: Any) -> Any:
        _refuse(other, self._counts)
        return float(self) * other

    def __rmul__(self, other: Any) -> Any:
        _refuse(other, self._counts)
        return other * float(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def _refuse(factor: Any, counts: _Counts) -> None:
    """Refuse to multiply the mean over all ranks by a count of this rank."""
    count, own = counts
    if (weight := _whole(factor)) in own and weight not in (0, count):
        raise ScriptError(
            f"the loss times {weight:g}: run.backward returns the mean over the {count:g} samples "
            f"(or tokens) of all ranks, and {weight:g} is the count of this rank; weight the loss "
            "by loss.count, or write float(loss) if the factor is not a count"
        )


def _whole(factor: Any) -> float:
    """Return a factor as a float if it may be a count, else 0."""
    if isinstance(factor, Tensor):
        return float(factor.detach()) if factor.numel() == 1 else 0.0
    is_count = isinstance(factor, int | np.integer) and not isinstance(factor, bool)
    return float(factor) if is_count else 0.0
