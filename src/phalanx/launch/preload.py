"""Modules that the forkserver imports once, so that ranks forked from it need not import them."""

import gc
import os
import pickle
import sys
import traceback
from importlib import import_module
from types import TracebackType

from phalanx.launch import process_memory
from phalanx.launch.signals import leave_to_parent

MODULES = (
    "torch._dynamo",  # which the first optimizer and the first dispatch mode import
    "torch.distributed.tensor",
    "phalanx.comm.join",
)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, unless the parent reports the cause or is interrupted.

    The parent reports a fork that a limit of processes forbids. A signal that interrupts the parent
    while it starts a process cuts off its message to the forkserver, or to the new process.
    """
    is_cut_off = isinstance(error, EOFError) or (
        isinstance(error, pickle.UnpicklingError) and "truncated" in str(error)
    )
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace)]
    is_of_message = modules[-1:] in (["multiprocessing.reduction"], ["multiprocessing.spawn"])
    if not isinstance(error, BlockingIOError) and not (is_cut_off and is_of_message):
        sys.__excepthook__(kind, error, trace)


if getattr(sys.modules["__main__"], "__file__", None) is None:  # in the forkserver, not in a rank
    if os.environ.get("PYTHONSAFEPATH") == "phalanx":  # set by local.py, for this process only
        del os.environ["PYTHONSAFEPATH"]
    leave_to_parent()  # the parent ends the ranks, and sees their ends, through this process
    process_memory.collect_rarely()
    try:
        for name in MODULES:
            import_module(name)
    finally:  # the forkserver continues after an ImportError, which each rank then raises
        process_memory.collect_as_usual()
    gc.freeze()  # full collections in ranks then neither visit these modules nor copy their memory
    sys.excepthook = _end
