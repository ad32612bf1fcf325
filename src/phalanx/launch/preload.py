"""Modules that the forkserver imports once, so that ranks forked from it need not import them."""

import sys
from types import TracebackType

import torch._dynamo as dynamo  # imported by the first optimizer and the first dispatch mode
from torch.distributed import tensor

from phalanx.comm import join

__all__ = ["dynamo", "join", "tensor"]


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback for a fork that a process limit forbids: the parent reports it."""
    if not isinstance(error, BlockingIOError):
        sys.__excepthook__(kind, error, trace)


if getattr(sys.modules["__main__"], "__file__", None) is None:  # in the forkserver, not in a rank
    sys.excepthook = _end
