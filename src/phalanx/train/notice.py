"""Say what a run is waiting for, where it waits for long."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console
from rich.text import Text

PATIENCE_S = 2.0
"""How long a person waits without a word."""


@contextmanager
def said_if_long(what: str) -> Generator[None]:
    """Print `what` on rank 0 if the block takes longer than a person waits without a word."""
    if dist.get_rank() != 0:
        yield
        return
    # A console of its own prints above the bar of the display, which takes over standard output.
    timer = threading.Timer(
        PATIENCE_S, lambda: Console().print(Text(f"{what} ..."), soft_wrap=True)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
