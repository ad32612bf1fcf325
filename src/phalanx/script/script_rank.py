"""Run the user's script on a rank of `phalanx run`, as `python script.py` would run it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from phalanx.errors import PhalanxError, ScriptError
from phalanx.launch.attach import ATTACH_CALLED, add_line, as_mistake, check_end, no_ends
from phalanx.launch.failure import exit_code_of
from phalanx.launch.heartbeat import PULSE
from phalanx.script.arguments import finding_modules
from phalanx.script.init import STRATEGY
from phalanx.script.loader import has_empty_batch
from phalanx.script.run import PROFILE

_EMPTY_BATCH: Final = (
    "The batch of this rank has no rows, because the global batch has fewer rows than there are "
    "ranks, and the script fails on 0 rows; give the DataLoader drop_last=True, or use no -1 in "
    "reshape"
)


def run_script(
    path: str, words: list[str], strategy: str | None, profile: str | None = None
) -> tuple[int, str]:
    """Run a script to its end in this process, which has joined a job.

    `words` are its arguments in `sys.argv`; `strategy` is the default of `phalanx.init`, and
    `profile` has the options by which each run profiles its steps.

    Returns:
        The signal on which the script stopped, or 0; and a sentence with the last checkpoint and
        how to resume from it.

    Raises:
        ScriptError: it called `sys.exit` with a code other than 0, or several ranks ran it and it
            neither joined the job, as `phalanx.init` does, nor called a collective.
    """
    if strategy is not None:
        os.environ[STRATEGY] = strategy
    if profile is not None:
        os.environ[PROFILE] = profile
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).resolve().parent))
    PULSE.now("the script")
    num_collectives = _num_collectives()
    no_ends()  # drop pending checks of earlier work in this process
    try:
        with finding_modules(path):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            said = stop.code if isinstance(stop.code, str) else f"exit code {stop.code}"
            error = ScriptError(f"{path} ended by sys.exit: {said}")
            error.exit_code = exit_code_of(stop.code)
            raise error from None
    except PhalanxError as error:
        add_line(error, path)
        raise
    except Exception as error:
        if "default process group twice" in str(error):
            num_ranks = dist.get_world_size()
            twice = ScriptError(
                "dist.init_process_group: phalanx run has initialized the process group already; "
                f"remove the call, or start the script by torchrun --nproc-per-node {num_ranks}"
            ).with_traceback(error.__traceback__)
            add_line(twice, path)
            raise twice from None
        if isinstance(mistake := as_mistake(error), PhalanxError):
            add_line(mistake, path)
            raise mistake from None
        if has_empty_batch():
            error.add_note(_EMPTY_BATCH)
        raise
    check_end()
    # A trainer of another library finds the process group, and divides the work itself.
    is_alone = not ATTACH_CALLED and _num_collectives() == num_collectives
    if dist.get_world_size() > 1 and is_alone:
        raise ScriptError(
            f"{path} never called phalanx.init, so {dist.get_world_size()} processes each did the "
            "same work; call phalanx.init, or start the script by python"
        )
    return PULSE.handled_signal, PULSE.resume_hint


def _num_collectives() -> int:
    """Return how many collectives of the job's process group have begun on this rank."""
    world: Any = dist.group.WORLD  # private method; tests/script/test_script_rank.py pins it
    return world._get_sequence_number_for_group() if dist.is_initialized() else 0
