"""Open the memory that another process of this host has as an anonymous file (memfd_create).

It is opened as /proc/PID/fd/NUMBER. Another container may have a process and a file of the same
numbers: whoever opens one compares its name, its size and a mark of the owner before mapping it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_file(
    process: int, number: int, name: str, num_bytes: int, *, is_written: bool
) -> Generator[int]:
    """Open an anonymous file of a process while the block runs; yield its number here.

    Raises:
        OSError: there is no such file here, this process may not open it, or it is not one of this
            name and size.
    """
    path = Path(f"/proc/{process}/fd/{number}")
    found = os.readlink(path)  # before opening it: that might wait, or do something
    if found != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is {found}, and no memory of the name {name}")
    opened = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        size = os.fstat(opened).st_size
        if size != num_bytes:
            raise OSError(f"{path} has {size} bytes, and not {num_bytes}")
        yield opened
    finally:
        os.close(opened)
