"""Intercept every operator that passes PyTorch's dispatcher, including operators of libraries.

A `Watch` is a dispatch mode that calls its method `run_operator` for each operator that runs inside
`with watch:`. The communication ledger, the check of collectives and memory accounting are watches.

[Note: Composites] One of our operators may consist of collectives and other operators, yet be a
single operator to PyTorch, so that recomputation can save its result alone. PyTorch disables a mode
while the mode handles an operator, so the mode would not see the operators inside. A watch
therefore runs the Python implementation of such an operator and stays enabled meanwhile: the watch,
and any modes outside of it, see each inner operator.

[Note: Compiled code] Dynamo permanently skips a function that it encounters under a dispatch mode:
one watched step would disable torch.compile for the rest of the run. Dynamo ignores a mode whose
`ignore_compile_internals` returns True, and the code stays compiled. So a watch sees all operators
around compiled code, including FSDP2's collectives, but inside only operators that the compiler did
not fuse: communicated bytes are counted completely, memory is not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COMPOSITE_NAMESPACE = "phalanx_tensor"
"""Namespace of the operators whose inner operators a watch sees, see [Note: Composites]."""

COMPOSITES: dict[OpOverload, Callable[..., Any]] = {}
"""Operator of `COMPOSITE_NAMESPACE` -> its Python implementation."""


def register_composite(operator: OpOverload, implementation: Callable[..., Any]) -> None:
    """Make every watch run `implementation`, and see its operators, when `operator` is called."""
    assert operator.namespace == COMPOSITE_NAMESPACE, f"{operator} is of another namespace"
    COMPOSITES[operator] = implementation


class Phases:
    """The name of the current phase of a step."""

    phase_name = "other"

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Set `phase_name` to `name` inside the block."""
        before, self.phase_name = self.phase_name, name
        try:
            yield
        finally:
            self.phase_name = before


class Watch(Phases, TorchDispatchMode):
    """A dispatch mode that calls `run_operator` for each operator, with `phase_name` set."""

    supports_higher_order_operators = True  # without it, the mode fails on such operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode, see [Note: Compiled code]."""
        return True

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, `func(*args, **kwargs)`, and return its result."""
        raise NotImplementedError

    @contextmanager
    def on_again(self) -> Generator[None]:
        """Enable this mode while it handles an operator, to see the inner operators."""
        super().__enter__()  # not self.__enter__: a subclass starts more than the mode
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
            return NotImplemented  # DTensor calls operators on its local shards, dispatched here
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)  # compiled code; its operators are dispatched here
        if func.namespace != COMPOSITE_NAMESPACE:
            return self.run_operator(func, args, kwargs)
        if func not in COMPOSITES:
            raise NotImplementedError(f"{func} was not given to phalanx.comm.watch")
        with self.on_again():
            return COMPOSITES[func](*args, **kwargs)
