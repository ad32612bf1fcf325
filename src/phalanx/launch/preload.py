"""What the server process imports once, so that each rank forked from it has it at once."""

import sys
from types import TracebackType

import torch._dynamo as dynamo  # the first optimizer and the first dispatch mode ask for it
from torch.distributed import tensor

from phalanx.comm import join

__all__ = ["dynamo", "join", "tensor"]


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say nothing of a fork that a limit forbids: the parent says what to raise."""
    if not isinstance(error, BlockingIOError):
        sys.__excepthook__(kind, error, trace)


if getattr(sys.modules["__main__"], "__file__", None) is None:  # the server, and no rank
    sys.excepthook = _end
