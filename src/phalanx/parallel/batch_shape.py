"""The shape of the full microbatch that the current forward computes.

A rank holds shards, so the modules inside a model cannot derive the shape of the full microbatch
from their inputs. The layer that receives the full ids stores the shape (`note`), and later layers
read it (`batch_shape`). The shape belongs to one forward, not to the model: the forward of a split
model runs in a separate scope, and the shape is dropped at its end. So several models can
alternate, and several forwards can run before the first backward, because operators save the shape
for their backward themselves.

    with batch_scope(BatchShape(rows, length)):    a pipeline stage without the embedding
        x = stage(x)

    carried(function)                              for recomputation in backward, outside of any
                                                   forward: uses the shape of the first run
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
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
    """Enter the scope of one forward, with microbatch `shape`, or the current shape if None."""
    token = _SHAPE.set(shape or _SHAPE.get())
    try:
        yield
    finally:
        _SHAPE.reset(token)


def note(shape: BatchShape) -> None:
    """Store the shape of the full microbatch for the later layers of this forward."""
    _SHAPE.set(shape)


def batch_shape() -> BatchShape:
    """Return the shape of the full microbatch of the current forward.

    Raises:
        RuntimeError: no forward is running.
    """
    shape = _SHAPE.get()
    if shape is None:
        raise RuntimeError(
            "tp: a layer runs outside of the forward of its model, where the shape of the full "
            "batch is unknown; run a model without its embedding inside `batch_scope`, and "
            "recompute by the strategy (recompute:full), not by the model's own checkpointing"
        )
    return shape


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` bound to the current context, so that backward can recompute it."""
    return functools.partial(copy_context().run, function)
