"""What `phalanx launch` passes to the ranks that it starts, and what rank 0 reports back.

    launcher ──ssh──> agent, one a host ──fork──> ranks       VARIABLE, a JSON object: `Launched`
    launcher <──ssh── agent <──file in `Launched.folder`──    `JobReport`, from rank 0

Ranks of one generation run until one of them is lost, or a host joins. The launcher then starts the
next generation on the hosts that are left, with another strategy, from the latest saved state.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from phalanx.errors import ConfigError
from phalanx.storage import replace_file

VARIABLE: Final = "PHALANX_LAUNCHED"
"""Environment variable of a rank that an agent of `phalanx launch` has started."""

REPORT: Final = "job.json"
"""File in `Launched.folder` of rank 0's host that has the `JobReport`."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """How the launcher continues a job; the first generation has neither strategies nor run.

    Attributes:
        folder: folder of the agent in the host's memory (tmpfs), which outlives the ranks.
        generation: number of restarts so far.
        restarts: number of restarts after which the job ends.
        strategy: strategy in place of the command's.
        first: strategy of the first generation.
        run: folder of the run to resume from its latest state, in place of the command's.
    """

    folder: str
    generation: int = 0
    restarts: int = 0
    strategy: str | None = None
    first: str | None = None
    run: str | None = None

    def text(self) -> str:
        """Return the value of VARIABLE."""
        return json.dumps(vars(self))


def launched() -> Launched | None:
    """Return what the agent passed to this rank; None in a process that no agent started."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Launched(**json.loads(text))


def is_restarted() -> bool:
    """Return whether this rank continues a job after a loss or a join, and so must be fast."""
    return (job := launched()) is not None and job.generation > 0


def require_agent(memory_every: int | None) -> None:
    """Raise ConfigError if states shall be in memory, and no agent started this process."""
    if memory_every and launched() is None:
        raise ConfigError(
            f"memory_every is {memory_every}, but no process would outlive the ranks with their "
            "state in memory; start the job by phalanx launch, or leave memory_every out"
        )


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """What the launcher must know of a job to continue it on other ranks.

    Attributes:
        strategy: the strategy of this generation.
        run: folder of the run; None in a loop of one's own, which names its folder itself.
        global_rows: rows of the global batch, which the data ranks must divide; None if any number
            of data ranks fits.
    """

    strategy: str
    run: str | None
    global_rows: int | None = None

    def write(self, folder: str) -> None:
        """Write the report for the agent; rank 0 calls this when its run has begun."""
        replace_file(Path(folder) / REPORT, json.dumps(vars(self)).encode())


def read_report(folder: str) -> JobReport | None:
    """Return the report of rank 0 on this host, or None if there is none yet."""
    try:
        return JobReport(**json.loads((Path(folder) / REPORT).read_text()))
    except FileNotFoundError:
        return None
