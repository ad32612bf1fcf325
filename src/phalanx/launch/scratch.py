"""One folder for all that a run leaves in the temporary folder; it goes when the process ends.

A process that was killed cannot clean up: the next one removes the folder whose lock nobody holds.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

from phalanx.storage import lock

PREFIX = "phalanx-"

LOCK = ".lock"

NEW_S = 10.0
"""A folder may have no lock for a moment while it is made, in seconds."""

LONGEST = 50
"""Characters of the temporary folder's name. A socket's may have 103, of which 50 come after it."""

AFTER_ALL = -1000
"""Priority of the removal at exit: after multiprocessing has removed its own folder from this."""


_made: list[Finalize] = []


@contextmanager
def scratch_folder() -> Generator[None]:
    """Have this process and those it starts inside put temporary files into a folder of its own.

    Nothing changes where the temporary folder cannot be written to: what needs it will say so. Nor
    where its name is so long that multiprocessing could not bind a socket below it.
    """
    shared = Path(tempfile.gettempdir())
    _sweep(shared)
    if len(str(shared)) > LONGEST:
        yield
        return
    try:
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=shared))
        held = os.open(own / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    lock(held)
    # What is compiled is of use to the next run: it stays where torch keeps it by itself. The
    # import of torch._dynamo makes that folder, also for those who compile nothing.
    compiled = shared / f"torchinductor_{getpass.getuser()}"
    _made.append(Finalize(None, _remove, (own, held, compiled), exitpriority=AFTER_ALL))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    try:
        yield
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def remove() -> None:
    """Remove the folder now, for a process that ends without the work that Python does at exit."""
    while _made:
        _made.pop()()


def _remove(own: Path, held: int, compiled: Path) -> None:
    shutil.rmtree(own, ignore_errors=True)
    os.close(held)
    with suppress(OSError):  # it is not there, or holds something
        compiled.rmdir()


def _sweep(shared: Path) -> None:
    """Remove the folders of runs that were killed."""
    for left in shared.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or another process removes it
            if time.time() - left.stat().st_mtime < NEW_S:
                continue
            held = os.open(left / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                if lock(held):  # None where there are no locks: the folder stays
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(held)
