"""Write what c10d, gloo and NCCL print to files of each rank: the setting `debug_net`.

    logs/net-rank-N.log     standard error of native code: c10d at level INFO, errors of gloo
    logs/nccl-rank-N.log    NCCL at level INFO

c10d reads its level when torch is imported, which the forkserver has done before a rank knows its
settings; so `begin` has c10d read it again. At level DETAIL c10d would print each call of the store
and wrap each group, which changes the calls that are looked for; so the level is INFO.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from phalanx.launch import rank_log
from phalanx.report.output import OTHER_FOLDER, writing
from phalanx.storage import open_to_append

VARIABLE: Final = "PHALANX_DEBUG_NET"
"""Environment variable with the folder of the files, which a process passes to the ranks of a job
that it starts or joins."""

READ_LEVEL: Final = "_ZN3c1011initLoggingEv"
"""Private symbol of c10 that reads TORCH_CPP_LOG_LEVEL; tests/launch/test_debug_net.py pins it."""


@contextmanager
def into(folder: Path | None) -> Generator[None]:
    """Let ranks that are started, or that this process joins, write their files to `folder`."""
    before = os.environ.get(VARIABLE)
    if folder is not None:
        os.environ[VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def begin(folder: str, rank: int) -> None:
    """Write the files of this rank from here on; call this before the rank connects to others.

    Raises:
        ConfigError: a file cannot be written.
    """
    import torch
    import torch.distributed as dist

    path = Path(folder) / f"net-rank-{rank}.log"
    with writing(path, OTHER_FOLDER):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(path) as file:
            rank_log.divert_native(file.fileno())
    os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
    for name, value in (
        ("TORCH_DISTRIBUTED_DEBUG", "INFO"),
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_FILE", str(path.with_name(f"nccl-rank-{rank}.log"))),
    ):
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()
    library = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library)), READ_LEVEL)()
