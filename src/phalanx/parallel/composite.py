"""Composite operators, which PyTorch sees as one operator, and once-differentiable functions.

A composite of block products, collectives and sums is one operator `phalanx_tensor::...` to the
dispatcher. So `recompute:selective` keeps its result like any matrix product, and neither the
products nor the messages run again. Ledgers see its inside ([Note: Composites] in comm/watch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, library
from torch.autograd import Function
from torch.autograd import function as torch_function
from torch.utils.flop_counter import register_flop_formula

from phalanx.comm.watch import COMPOSITE_NAMESPACE, register_composite

_Backward = TypeVar("_Backward", bound=Callable[..., Any])
_Owner = TypeVar("_Owner")

_LIBRARY = library.Library(COMPOSITE_NAMESPACE, "FRAGMENT")


def once_differentiable(backward: _Backward) -> _Backward:
    """Make autograd raise on a second derivative through `backward`, which would be wrong.

    A typed wrapper of torch's untyped decorator.
    """
    return cast(_Backward, torch_function.once_differentiable(backward))


def mapped(
    x: Tensor, forward: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return forward(x), with the gradient `back(gradient of the result)`; saves no tensor."""
    return cast(Tensor, _Map.apply(x, forward, back))


class _Map(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad_outputs[0]), None, None


class Composite(Generic[_Owner]):
    """A method of an object, registered as one PyTorch operator.

    PyTorch operators take only tensors and numbers. So a context variable holds the object, such
    as a layout of tp, while the operator runs.
    """

    def __init__(
        self,
        schema: str,
        flops: Callable[..., int],
    ) -> None:
        """Register the operator.

        Args:
            schema: name, arguments and results in the syntax of `torch.library`. The object has a
                method of this name, which is called with all arguments except the last; the last
                one serves only the count of FLOPs.
            flops: FLOP formula on the arguments' shapes, see `torch.utils.flop_counter`.
        """
        name = schema.partition("(")[0]
        self._owner: ContextVar[_Owner] = ContextVar(name)

        def run(*args: Any) -> Any:
            return getattr(self._owner.get(), name)(*args[:-1])

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        self._operator: Any = getattr(getattr(torch.ops, COMPOSITE_NAMESPACE), name)
        register_composite(self._operator.default, run)
        register_flop_formula(self._operator)(flops)

    def __call__(self, owner: _Owner, *args: Any) -> Any:
        """Run the operator as a method of `owner`."""
        token = self._owner.set(owner)
        try:
            return self._operator(*args)
        finally:
            self._owner.reset(token)
