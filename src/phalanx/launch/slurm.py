"""Set torchrun's variables from Slurm's, so that `srun phalanx train` needs no other launcher."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from typing import Final

from phalanx.errors import ConfigError

NEEDED: Final = (
    *("SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables that each task of `srun` has; the script of `sbatch` itself lacks some of them."""

FIRST_PORT: Final = 20000
NUM_PORTS: Final = 20000
"""Number of ports: job id and step id select one, so tasks agree and two jobs rarely collide."""


def adopt(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's unset variables, if this is one of several tasks of `srun`.

    Nothing is set if RANK or WORLD_SIZE is set and RANK differs from SLURM_PROCID.

    Raises:
        ConfigError: the tasks of a host are not numbered consecutively, or only one of RANK and
            WORLD_SIZE is set.
    """
    is_of_srun = environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if "RANK" in environment or "WORLD_SIZE" in environment:
        is_of_srun = environment.get("RANK") == environment.get("SLURM_PROCID")
    if is_of_srun and all(name in environment for name in NEEDED):
        rank, local_rank = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
        tasks = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
        node = int(environment.get("SLURM_NODEID", 0))
        if sum(tasks[:node]) + local_rank != rank:
            raise ConfigError(
                f"SLURM_PROCID is {rank} and SLURM_LOCALID {local_rank} on node {node}, but the "
                f"ranks of a host must be consecutive, which requires SLURM_PROCID "
                f"{sum(tasks[:node]) + local_rank}; start them with srun --distribution=block"
            )
        step = int(environment.get("SLURM_STEP_ID", 0))
        port = FIRST_PORT + (int(environment.get("SLURM_JOB_ID", 0)) * 16 + step) % NUM_PORTS
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(tasks[node]),
            "MASTER_ADDR": first_node(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(port),
        }
        for name, value in variables.items():
            environment.setdefault(name, value)
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in environment and other not in environment:
            raise ConfigError(
                f"the environment's {name} is '{environment[name]}', but {other} is not set; set "
                f"both, as torchrun does for each process of a job, or unset {name}"
            )


def tasks_of_nodes(text: str) -> list[int]:
    """Return [2, 2, 2, 1] for "2(x3),1"."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks


def first_node(text: str) -> str:
    """Return "gpu07" for "gpu[07-09,12],cpu1", and "node-3" for "node-3,node-4"."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", text)
    return "".join(part or "" for part in match.groups()) if match else text
