"""What the layers of another stage give in a forward, of which a stage needs no number.

A stage runs the forward of the whole model, and what comes before its first layer computes on what
absent layers give. Shapes, data types and devices of that are known; numbers are not, and the first
layer takes what was received in their place. So it is followed where they go:

    before the first layer    tensors made of them are not known either, whatever their data type: a
                              mask, an index; where the host reads them, or a shape depends on them,
                              the model cannot be cut there
    from the first layer on   the tensor that this layer takes is what was received, also for those
                              who use it afterwards; of others nothing may be computed

A result that needs only the shape, the data type or the device, as of `zeros_like`, is known.
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
"""Operators that read no number of their first argument."""

_BY_INDEX = frozenset(["index", "masked_select"])
"""Operators the shape of whose result depends on all arguments but the first."""

_READ = frozenset(["tolist", "numpy", "__array__", "__dlpack__"])
"""Methods that bring numbers to the host past the dispatcher."""

_SHOW = frozenset(["__repr__", "__str__", "__format__"])
"""Methods that show numbers, which nothing computes with."""


class Awaited(Tensor):
    """A tensor that depends on what an absent layer gives; its floating-point numbers are NaN.

    Attributes:
        check: raises an error where an operator of some name may not run on it; called with
            whether its numbers are read.
        received: what stands in its place, once the first layer of the stage has taken it.
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
        """Run a function of torch, and have what depends on the awaited arguments be awaited."""
        name = getattr(func, "__name__", str(func))
        args = tree_map(received_for, args)
        kwargs = cast(dict[str, Any], tree_map(received_for, kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        awaited = next((leaf for leaf in leaves if isinstance(leaf, Awaited)), None)
        if awaited is None:
            return func(*args, **kwargs)
        # Torch's own, by which the default of this method runs a function.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            if name in _SHOW:
                return func(*args, **kwargs)
            check = awaited.check
            if name in _READ:
                check(name, True)
            with _Follow(leaves, check) as follow:
                result = func(*args, **kwargs)
            for leaf in leaves:  # what was written into
                if follow.has(leaf) and not isinstance(leaf, Awaited):
                    if type(leaf) is not Tensor or leaf._is_view():  # pyright: ignore[reportPrivateUsage]
                        check(name, True)
                    await_(leaf, check)

            def mark(leaf: Any) -> Any:
                is_new = isinstance(leaf, Tensor) and not isinstance(leaf, Awaited)
                return await_(leaf, check) if is_new and follow.has(leaf) else leaf

            return tree_map(mark, result)


def await_(tensor: Tensor, check: Callable[[str, bool], None]) -> Awaited:
    """Make a tensor, in place, one that is awaited; see `Awaited` for `check`."""
    tensor.__class__ = Awaited
    assert isinstance(tensor, Awaited)
    tensor.check, tensor.received = check, None
    return tensor


def received_for(value: Any) -> Any:
    """Return what was received in place of an awaited tensor; else the value itself."""
    if isinstance(value, Awaited) and value.received is not None:
        return value.received
    return value


class _Follow(TorchDispatchMode):
    """Follows awaited numbers through the operators that a function is made of."""

    supports_higher_order_operators = True

    def __init__(self, leaves: Sequence[Tensor], check: Callable[[str, bool], None]) -> None:
        super().__init__()
        self._check = check
        self._kept: list[Tensor] = []
        self._storages: set[int] = set()
        for leaf in leaves:
            if isinstance(leaf, Awaited):
                self._add(leaf)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code as it is."""
        return True

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on awaited numbers."""
        return _storage(tensor) in self._storages

    def _add(self, tensor: Tensor) -> None:
        self._kept.append(tensor)  # so that its storage is nobody else's
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
        given = dict(zip(of, args, strict=False)) | kwargs
        written = [value for key, value in given.items() if of[key] and of[key].is_write]
        for leaf in tree_leaves((result, written)):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def absent(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor without numbers, of which a gradient is asked for if of `like` one is."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return like.new_zeros(shape, dtype=dtype)
    nothing = like.new_full((), math.nan, dtype=dtype).requires_grad_(like.requires_grad)
    return nothing.expand(shape).clone()  # what follows may change it in place


class StandIn(Function):
    """A tensor on the memory of another, with its gradient.

    It is no view, so that what follows may change it in place, as it may what a layer returns.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        """Return a tensor like `received`."""
        given = received.new_empty(0)
        given.data = received.detach()
        return given

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Return the gradient of `received`."""
        return grad_outputs[0]
