"""Timed layers: each operator waits for its time instead of computing, and messages are real.

So 8 ranks run on 2 cores as they would on 8: a rank that sleeps needs no core. All else is as in
training: the code of the layers, their graph, the order and the bytes of collectives. The values
of tensors mean nothing.

An operator runs a few times when it is first called with some shapes, and keeps the seconds of
the processor that it took. Later calls return uninitialized tensors. Sleeping is inexact below a
millisecond, so that the rank owes the time of small operators, and pays before each collective and
each wait, where another rank could notice.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.waits import around_waits
from phalanx.comm.watch import Watch

SMALLEST: Final = 1024
"""Elements of the largest tensor of an operator below which it computes."""

TRIALS: Final = 3
"""Runs of an operator, of which the fastest counts."""

DEBT_S: Final = 2e-3
"""Debt from which on a rank sleeps at once, in seconds."""


class TimedArithmetic(Watch):
    """A watch under which large operators that allocate or change tensors are timed waits."""

    def __init__(self) -> None:
        super().__init__()
        self._costs: dict[Any, tuple[float, Any]] = {}
        self._is_free: dict[Any, bool] = {}
        self._is_small: dict[Any, bool] = {}
        self._debt_s = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """Replace the operators of the block; pay at waits before their time is measured."""

        @contextmanager
        def on_wait(*_: object) -> Generator[None]:
            self.pay()
            yield

        with self, around_waits(on_wait):
            yield

    def pay(self) -> None:
        """Sleep for the time that the skipped operators would have taken."""
        if self._debt_s > 0:
            begin_s = time.perf_counter()
            time.sleep(self._debt_s)
            self._debt_s -= time.perf_counter() - begin_s

    @override
    def run_call(self, call: Call, run: Any) -> Any:
        self.pay()
        return run()

    @override
    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin_s = time.perf_counter()
        if func not in self._is_free:
            self._is_free[func] = _computes_nothing(func)
        if self._is_free[func]:
            return func(*args, **kwargs)
        key = (func, *map(_key, args), *((name, _key(each)) for name, each in kwargs.items()))
        if key not in self._is_small:
            tensors = [
                leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            ]
            floats = [tensor.numel() for tensor in tensors if tensor.is_floating_point()]
            self._is_small[key] = max(floats, default=0) < SMALLEST
        if self._is_small[key]:
            return func(*args, **kwargs)
        if key not in self._costs:
            trials, result = list[float](), None
            for _ in range(TRIALS):
                used_s = time.thread_time()
                result = func(*args, **kwargs)
                trials.append(time.thread_time() - used_s)
            self._costs[key] = min(trials), pytree.tree_map(_like, result)
            begin_s = time.perf_counter() - min(trials)  # the time has passed
        cost_s, outline = self._costs[key]
        if func._schema.is_mutable:
            result = kwargs.get("out", args[0]) if func._schema.returns else None
        else:
            result = pytree.tree_map(_allocated, outline)
        self._debt_s += cost_s - (time.perf_counter() - begin_s)
        if self._debt_s > DEBT_S:
            self.pay()
        return result


def _computes_nothing(func: Any) -> bool:
    """Return whether an operator computes nothing, as a view, or returns what cannot be skipped."""
    schema = func._schema
    is_view = any(each.alias_info is not None for each in schema.returns) and not schema.is_mutable
    is_unlike = schema.is_mutable and len(schema.returns) > 1
    is_ours = func.namespace in ("aten", "phalanx")
    return is_view or is_unlike or not is_ours or "local_scalar" in schema.name


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else value


def _like(leaf: Any) -> Any:
    """Return a function that allocates a tensor like `leaf`; small ones are filled with 1."""
    if not isinstance(leaf, Tensor):
        return leaf
    size, stride, dtype, device = leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if leaf.numel() < SMALLEST:  # a loss, a norm: finite, and so is its logarithm
        return lambda: torch.ones(size, dtype=dtype, device=device)
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _allocated(leaf: Any) -> Any:
    return leaf() if callable(leaf) else leaf
