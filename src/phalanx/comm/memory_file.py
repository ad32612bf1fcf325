"""Open an anonymous memory file (memfd_create) of another process on this host.

The file is opened as /proc/PID/fd/NUMBER. In another container the same numbers may mean another
process and file, so callers must compare a token of the owner, in addition to the name and size
compared here, before they map it.
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
    """Open descriptor `number` of a process while the block runs; yield this process's descriptor.

    Raises:
        OSError: the file does not exist, this process may not open it, or it has another name or
            size.
    """
    path = Path(f"/proc/{process}/fd/{number}")
    found = os.readlink(path)  # before opening, because opening a pipe or device could block
    if found != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is {found}; expected a memory file named {name}")
    opened = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        size = os.fstat(opened).st_size
        if size != num_bytes:
            raise OSError(f"{path} has {size} bytes; expected {num_bytes}")
        yield opened
    finally:
        os.close(opened)
