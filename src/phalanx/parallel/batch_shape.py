"""The shape of the microbatch that a forward is under way for.

A rank holds shards, so the modules inside a model cannot read the shape of the full batch off what
they are given. The layer that sees the full ids notes it (`note`), and those behind it look it up
(`batch_shape`). It belongs to one forward and not to the model: the forward of a model that is
split runs in a scope of its own, at whose end it is forgotten. So several models can run in turn,
and forwards of several microbatches can come before the first backward: operators keep what they
need for backward themselves.

    with batch_scope(BatchShape(rows, length)):    a stage of a pipeline that embeds no ids
        x = stage(x)

    carried(function)                              what runs again in backward, when no forward is
                                                   under way: it keeps the shape of its first run
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchShape:
    """Rows and positions of a full microbatch, [B, T], without padding."""

    num_rows: int
    length: int


_SHAPE: ContextVar[BatchShape | None] = ContextVar("batch shape", default=None)


@contextmanager
def batch_scope(shape: BatchShape | None = None) -> Generator[None]:
    """Run one forward: of a microbatch of `shape`, or of the one already known, if None."""
    token = _SHAPE.set(shape or _SHAPE.get())
    try:
        yield
    finally:
        _SHAPE.reset(token)


def note(shape: BatchShape) -> None:
    """Let what follows in this forward know the full microbatch."""
    _SHAPE.set(shape)


def batch_shape() -> BatchShape:
    """Return the shape of the full microbatch of the forward under way.

    Raises:
        RuntimeError: no forward is under way.
    """
    shape = _SHAPE.get()
    if shape is None:
        raise RuntimeError(
            "tp: a layer runs outside of the forward of its model, and the shape of the full batch "
            "is not known there; run a model without its embedding inside `batch_scope`, and "
            "recompute by the strategy (recompute:full), not by the model's own checkpointing"
        )
    return shape


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` bound to the shape known now, so that it may run again at any time."""
    shape = _SHAPE.get()

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with batch_scope(shape):
            return function(*args, **kwargs)

    return run
