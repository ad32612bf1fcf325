"""Join the job that torchrun (or Slurm through it) has started this process for."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from phalanx.errors import PhalanxError
from phalanx.launch.local import num_cores


def is_under_torchrun() -> bool:
    """Return whether the environment says that this process is a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_here(
    function: Callable[..., Any],
    *args: Any,
    device: str = "auto",
    threads: int | None = None,
    timeout_s: float = 600.0,
) -> Any:
    """Join the job, run `function(*args)`, and wait for the other ranks.

    Args:
        function: called with torch.distributed initialised.
        *args: its arguments.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of this rank; the host's cores shared evenly if None.
        timeout_s: longest wait for another rank in one collective, in seconds.
    """
    import torch

    from phalanx import mesh
    from phalanx.comm.primitives import barrier

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, num_cores() // num_here))
    mesh.join(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device=device, timeout_s=timeout_s
    )
    result = function(*args)
    barrier()
    return result


def leave(exit_code: int) -> NoReturn:
    """End this rank without tearing its threads down, which sometimes aborts what succeeded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def leave_failed(error: BaseException) -> NoReturn:
    """Print this rank's own error, the last thing it prints, and leave.

    An error of the user's is one message; any other comes with its traceback.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    rank = os.environ["RANK"]
    if isinstance(error, Exception):
        handler = get_error_handler()  # torchrun shows what this writes in its own summary
        handler.initialize()
        handler.record_exception(error)
    if isinstance(error, PhalanxError):
        print(f"rank {rank}: {error}", file=sys.stderr)  # noqa: T201 - no command line under torchrun
        leave(error.exit_code)
    print(f"rank {rank} failed:", file=sys.stderr)  # noqa: T201
    traceback.print_exception(error)
    leave(1)
