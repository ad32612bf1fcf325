"""Descriptors of a role of which strangers' connections can take only some.

ZeroMQ accepts a connection before its peer has shown the secret, and reads a whole frame of its
handshake. So a role has a low limit of descriptors, and short frames over TCP (wire.py): 1,000
strangers take about 50 MB of it. For descriptors of its own the role raises the limit.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

MOST: Final = 1024
"""Most descriptors of a role, its connections included."""

_CHANGING = threading.Lock()


def limit_descriptors() -> None:
    """Limit the descriptors of this process to `MOST`, unless its limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, MOST), hard))


@contextmanager
def own_descriptors() -> Generator[None]:
    """Let this process open descriptors inside the block that strangers cannot take."""
    with _CHANGING:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * MOST, hard)), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
