"""Awaited tensors (`UnknownTensor`): outputs of absent layers, with known shape, unknown values.

A stage runs the forward of the full model, so the code before its first layer runs on outputs of
absent layers. Shapes, dtypes and devices of these outputs are known, their values are not; the
first layer receives the real activation instead. So awaited tensors are tracked:

    before the first layer    results computed from awaited tensors are awaited too, whatever their
                              dtype, such as a mask or an index; if the host reads their values, or
                              a shape depends on the values, the model cannot be cut there
    from the first layer on   the input of this layer is the received activation, also in later code
                              that uses the same tensor; other awaited tensors cannot be used

A result that depends only on shape, dtype or device, as of `zeros_like`, is not awaited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

_CREATE = frozenset(
    "empty_like full_like ones_like rand_like randint_like randn_like zeros_like new_empty "
    "new_empty_strided new_full new_ones new_zeros".split()
)
"""Operators that do not read the values of their first argument."""

_BY_INDEX = frozenset(["index", "masked_select"])
"""Operators whose result shape depends on the values of all arguments except the first."""

_READ = frozenset(["tolist", "numpy", "__array__", "__dlpack__"])
"""Methods that copy values to the host without a call of the dispatcher."""

_SHOW = frozenset(["__repr__", "__str__", "__format__"])
"""Methods that print values; they are allowed, since no computation uses the text."""


class UnknownTensor(Tensor):
    """A tensor that depends on an absent layer's output; its floating-point values are NaN.

    Attributes:
        check: called with the name of an operator and whether it reads values; raises an error if
            the operator must not run on the tensor.
        received: the received activation that replaces this tensor, set when the first layer of the
            stage takes it as its input.
    """

    check: Callable[[str, bool], None]
    received: Tensor | None

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, and make results that depend on awaited arguments awaited."""
        name = getattr(func, "__name__", str(func))
        args = tree_map(received_for, args)
        kwargs = cast(dict[str, Any], tree_map(received_for, kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        awaited = next((leaf for leaf in leaves if isinstance(leaf, UnknownTensor)), None)
        if awaited is None:
            return func(*args, **kwargs)
        # The default implementation of `__torch_function__` uses this context as well.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            if name in _SHOW:
                return func(*args, **kwargs)
            check = awaited.check
            if name in _READ:
                check(name, True)
            with _TrackUnknown(leaves, check) as follow:
                result = func(*args, **kwargs)
            for leaf in leaves:  # arguments that the function has written
                if follow.has(leaf) and not isinstance(leaf, UnknownTensor):
                    if type(leaf) is not Tensor or leaf._is_view():  # pyright: ignore[reportPrivateUsage]
                        check(name, True)
                    mark_unknown(leaf, check)

            def mark(leaf: Any) -> Any:
                is_new = isinstance(leaf, Tensor) and not isinstance(leaf, UnknownTensor)
                return mark_unknown(leaf, check) if is_new and follow.has(leaf) else leaf

            return tree_map(mark, result)


def mark_unknown(tensor: Tensor, check: Callable[[str, bool], None]) -> UnknownTensor:
    """Turn a tensor into an `UnknownTensor`, in place; see `UnknownTensor` for `check`."""
    tensor.__class__ = UnknownTensor
    assert isinstance(tensor, UnknownTensor)
    tensor.check, tensor.received = check, None
    return tensor


def received_for(value: Any) -> Any:
    """Return the received activation that replaces an awaited tensor; any other value as it is."""
    if isinstance(value, UnknownTensor) and value.received is not None:
        return value.received
    return value


class _TrackUnknown(TorchDispatchMode):
    """Dispatch mode that tracks awaited tensors through the operators of one torch function."""

    supports_higher_order_operators = True

    def __init__(self, leaves: Sequence[Tensor], check: Callable[[str, bool], None]) -> None:
        super().__init__()
        self._check = check
        self._kept: list[Tensor] = []
        self._storages: set[int] = set()
        for leaf in leaves:
            if isinstance(leaf, UnknownTensor):
                self._add(leaf)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: do not intercept operators of compiled code."""
        return True

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on awaited values, found by its storage."""
        return _storage(tensor) in self._storages

    def _add(self, tensor: Tensor) -> None:
        self._kept.append(tensor)  # a reference, so that no other tensor reuses its storage
        self._storages.add(_storage(tensor))

    def _any(self, values: Any) -> bool:
        return any(isinstance(leaf, Tensor) and self.has(leaf) for leaf in tree_leaves(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not self._any((args[1:] if name in _CREATE else args, kwargs)):
            return func(*args, **kwargs)
        decides = args[1:] if name in _BY_INDEX else args
        is_shape_read = torch.Tag.dynamic_output_shape in func.tags and self._any((decides, kwargs))
        self._check(name, is_shape_read or torch.Tag.data_dependent_output in func.tags)
        result = func(*args, **kwargs)
        of = {argument.name: argument.alias_info for argument in func._schema.arguments}
        arguments = dict(zip(of, args, strict=False)) | kwargs
        written = [value for key, value in arguments.items() if of[key] and of[key].is_write]
        for leaf in tree_leaves((result, written)):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def absent(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a placeholder tensor on the device of `like`: NaN, or zeros of a non-float dtype.

    A placeholder of a floating-point or complex dtype requires a gradient if `like` does.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return like.new_zeros(shape, dtype=dtype)
    nothing = like.new_full((), math.nan, dtype=dtype).requires_grad_(like.requires_grad)
    return nothing.expand(shape).clone()  # a copy, because later code may write it in place


class StandIn(Function):
    """An identity whose result aliases the memory of its input, and passes the gradient through.

    The result is not an autograd view, so that later code may write it in place, as it may write a
    layer's output.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        """Return a new tensor on the memory of `received`."""
        alias = received.new_empty(0)
        alias.data = received.detach()
        return alias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Return the gradient of the result, which is the gradient of `received`."""
        return grad_outputs[0]
