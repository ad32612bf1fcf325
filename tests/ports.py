"""Ports that no other process takes before a store listens on them."""

import socket
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Generator[str]:
    """Yield a port on which only sockets with SO_REUSEADDR, as those of torch, can listen inside.

    A connection is refused while none does.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield str(bound.getsockname()[1])
