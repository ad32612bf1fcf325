"""See every operator that passes PyTorch's dispatcher, whoever calls it.

A `Watch` is a dispatch mode; what runs inside `with watch:` comes to its `see`, operator by
operator. The ledger of bytes, the check of collectives and the account of memory are watches.

[Note: Composites] An operator of our own may be made of collectives and other operators, yet be one
to PyTorch, so that recomputation can keep its result alone. While a mode handles an operator it is
off, and would not see the inside. So a watch runs the Python implementation of such an operator
instead, and is on meanwhile: it sees each operator within, and so do the modes outside of it.

[Note: Compiled code] Dynamo skips a function for good once it meets it under a dispatch mode: one
watched step would switch torch.compile off for the rest of the run. A mode that says it ignores
what compiled code does inside is left alone, and the code stays compiled. So a watch sees the
operators around compiled code, collectives of FSDP2 among them, and of the inside only what the
compiler did not fuse: bytes are counted whole, memory is not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COMPOSITE_NAMESPACE = "phalanx_tensor"
"""Of the operators that a watch sees the inside of, see [Note: Composites]."""

COMPOSITES: dict[OpOverload, Callable[..., Any]] = {}
"""Operator of that namespace -> its implementation."""


def register_composite(operator: OpOverload, implementation: Callable[..., Any]) -> None:
    """Have every watch run `implementation`, and see what it does, where `operator` is called."""
    assert operator.namespace == COMPOSITE_NAMESPACE, f"{operator} is of another namespace"
    COMPOSITES[operator] = implementation


class Phases:
    """Holds which phase of a step is under way."""

    phase_name = "other"

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Book what runs inside under `name`."""
        before, self.phase_name = self.phase_name, name
        try:
            yield
        finally:
            self.phase_name = before


class Watch(Phases, TorchDispatchMode):
    """Sees the operators that run inside `with watch:`, each in its phase of the step."""

    supports_higher_order_operators = True  # without it, the mode fails where it meets one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code as it is, see [Note: Compiled code]."""
        return True

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, `func(*args, **kwargs)`, and return its result."""
        raise NotImplementedError

    @contextmanager
    def on_again(self) -> Generator[None]:
        """Be on while this mode handles an operator, to see what that does in turn."""
        super().__enter__()  # a subclass begins and ends more than the mode
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs operators on its parts, which come back here
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)  # of compiled code: it calls operators, which come here
        if func.namespace != COMPOSITE_NAMESPACE:
            return self.see(func, args, kwargs)
        if func not in COMPOSITES:
            raise NotImplementedError(f"{func} was not given to phalanx.comm.watch")
        with self.on_again():
            return COMPOSITES[func](*args, **kwargs)
