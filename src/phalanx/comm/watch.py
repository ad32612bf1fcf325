"""Intercept each collective and each operator of PyTorch, also if a library calls it.

A `Watch` is a dispatch mode. Inside `with watch:` it calls its method `run_call` for each
collective, and `run_operator` for each other operator. The check of collectives and memory
accounting are watches. Two paths lead to `run_call`:

    torch.distributed, FSDP2, DTensor -> the dispatcher -> a watch -> run_call -> operator
    exchange, shared_memory           -> `call`         -> a watch -> run_call -> engine

[Note: Calls alone] A mode costs microseconds an operator, and torch.profiler records each operator
twice under it. A `CallWatch`, such as the ledger, is no mode and sees collectives alone: a kernel
of all collectives at the key BackendSelect, which the dispatcher visits below autograd and modes,
asks for the watches of this thread, and passes the call on to its backend.

[Note: Unwatched] Inside of `call` all modes are off, as in gloo's thread. A rank continues a
collective wherever it waits, possibly in a recomputed forward or in a step whose memory is counted:
recomputation would expect the inner operators again in backward, and memory accounting would count
the memory of other ranks. An engine reports its memory by `allocated`.

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

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Self, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.library import Library
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.calls import KINDS, NAMESPACES, Call, read_call

Result = TypeVar("Result")

# Private, and the only way past a kernel; tests/comm/test_watch.py pins it.
_BACKENDS: Final = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)  # pyright: ignore[reportPrivateUsage]

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


class _CallObserver(Phases):
    """What both kinds of watches do at a collective; subclasses do more."""

    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        """Run a collective, `run()`, and return its result."""
        del call
        return run()


class CallWatch(_CallObserver):
    """Sees each collective inside `with watch:`, and no other operator; [Note: Calls alone]."""

    def __enter__(self) -> Self:
        if not _LIBRARIES:
            _LIBRARIES.extend(_registered())
        self._thread = threading.get_ident()
        _CALL_WATCHES.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _CALL_WATCHES.remove(self)

    @property
    def is_here(self) -> bool:
        """Whether this thread is the one of the watch, or runs its backward on a GPU."""
        return self._thread == threading.get_ident() or torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


_CALL_WATCHES: Final[list[CallWatch]] = []
_LIBRARIES: Final[list[Library]] = []
"""Registrations of `_run_kernel`, made for the first `CallWatch`."""


def _registered() -> Iterator[Library]:
    """Register `_run_kernel` for all collectives of the dispatcher."""
    for namespace in NAMESPACES:
        library = Library(namespace, "IMPL")
        packets = [getattr(getattr(torch.ops, namespace), name, None) for name in KINDS]
        for packet in filter(None, packets):
            for overload in packet.overloads():
                operator = getattr(packet, overload)
                name, kernel = operator.name().partition("::")[2], partial(_run_kernel, operator)
                library.impl(name, kernel, "BackendSelect", with_keyset=True)
        yield library


def _run_kernel(operator: OpOverload, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Run a collective of the dispatcher as a call for each `CallWatch`."""
    watches = [watch for watch in _CALL_WATCHES if watch.is_here]
    # Private; `unwatched` excludes this key. tests/comm/test_watch.py pins it.
    if not watches or torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python):  # pyright: ignore[reportPrivateUsage]
        return operator.redispatch(keys & _BACKENDS, *args, **kwargs)

    def start() -> Any:
        with unwatched():  # the collectives of which a functional one consists
            return operator.redispatch(keys & _BACKENDS, *args, **kwargs)

    each, called = start, read_call(operator, args, kwargs)
    assert called is not None, f"{operator} is a collective"
    for watch in watches:
        each = partial(watch.run_call, called, each)
    return each()


class Watch(_CallObserver, TorchDispatchMode):
    """A dispatch mode that sees each collective and each operator, with `phase_name` set."""

    supports_higher_order_operators = True  # without it, the mode fails on such operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode, see [Note: Compiled code]."""
        return True

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is no collective, `func(*args, **kwargs)`; return its result."""
        return func(*args, **kwargs)

    def allocated(self, tensor: Tensor) -> None:
        """Note a tensor that an engine has allocated."""

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
            if (called := read_call(func, args, kwargs)) is None:
                return self.run_operator(func, args, kwargs)
            return self.run_call(called, partial(func, *args, **kwargs))
        if func not in COMPOSITES:
            raise NotImplementedError(f"{func} was not given to phalanx.comm.watch")
        with self.on_again():
            return COMPOSITES[func](*args, **kwargs)


# Private, and the only cheap way to disable all dispatch modes; see [Note: Unwatched].
# tests/comm/test_shared_memory.py pins it.
unwatched = torch._C._DisableTorchDispatch  # pyright: ignore[reportPrivateUsage]


def call(called: Call, run: Callable[[], Result]) -> Result:
    """Run a collective of our engines, which `run` starts, as one call for each active watch.

    Its arguments are named as in torch's operators: `tensor`, or `output` and `input`; `reduce_op`,
    `root_rank`, `dst`, `src`, `tag`, sizes of splits.
    """
    if not _CALL_WATCHES and not torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage]
        return run()

    def start() -> Result:
        with unwatched():
            return run()

    each: Callable[[], Result] = start
    for watch in (*active(), *(watch for watch in _CALL_WATCHES if watch.is_here)):
        each = partial(watch.run_call, called, each)  # the last one runs first
    return each()


def allocated(tensor: Tensor) -> Tensor:
    """Report a tensor that an engine has allocated to each active watch, and return it."""
    for watch in active():
        watch.allocated(tensor)
    return tensor


def active() -> list[Watch]:
    """Return the watches of this thread, outer to inner."""
    # Private, and the only way to the modes; tests/comm/test_watch.py pins it.
    modes = _python_dispatch._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
    return [mode for mode in modes if isinstance(mode, Watch)]
