"""Set torchrun's variables from a launcher's, so that `srun` or `mpirun phalanx train` suffices."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

from phalanx.errors import ConfigError
from phalanx.launch.interface import is_here


class LauncherVariables(NamedTuple):
    """A program that starts ranks, and the variables that each of them gets.

    Attributes:
        rank: variable with the number of this process in the job.
        num_ranks: variable with the number of processes of the job.
        local_rank: variable with the number of this process on its host.
        num_here: variable with the number of processes on this host; Slurm's lists all hosts.
        option: words that name the host of rank 0 to all ranks.
        is_first_a_launch_node: whether the first host of the batch job runs no rank.
    """

    rank: str
    num_ranks: str
    local_rank: str
    num_here: str
    option: str
    is_first_a_launch_node: bool = False


SRUN: Final = LauncherVariables(
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", ""
)

# A launcher may start another one: mpirun starts its daemons by srun, and they pass SLURM_PROCID,
# which is a daemon's number, to the ranks. So the inner launchers come first. Variables are of
#   Spectrum LSF      https://www.ibm.com/docs/en/spectrum-lsf
#   Open MPI          https://docs.open-mpi.org, "Environment variables set for MPI applications"
#   MPICH, Intel MPI  MPICH's process manager Hydra; PBS's mpiexec on Cray (PALS) has other names
LAUNCHERS: Final = (
    LauncherVariables(
        *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        *("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        "jsrun -E MASTER_ADDR=HOST",
        is_first_a_launch_node=True,
    ),
    LauncherVariables(
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "mpirun -x MASTER_ADDR=HOST",
    ),
    LauncherVariables(
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        "mpiexec -genv MASTER_ADDR HOST",
    ),
    LauncherVariables(
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "mpiexec -genv MASTER_ADDR HOST",
    ),
    LauncherVariables(
        *("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
        "mpiexec --env MASTER_ADDR=HOST",
    ),
    SRUN,
)

JOBS: Final = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "LSB_JOBID", "PBS_JOBID", "SLURM_JOB_ID"),
)
"""Variables that are equal on all ranks of a job and differ between jobs, the best first."""

FIRST_PORT: Final = 20000
NUM_PORTS: Final = 20000
"""Number of ports: the id of the job selects one, so ranks agree and two jobs rarely collide."""


def adopt(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's unset variables, if a launcher of LAUNCHERS started this and other ranks.

    Nothing is set if RANK or WORLD_SIZE is set and RANK differs from the launcher's.

    Raises:
        ConfigError: the ranks of a host are not numbered consecutively, the host of rank 0 is
            unknown, or only one of RANK and WORLD_SIZE is set.
    """
    is_set = "RANK" in environment or "WORLD_SIZE" in environment
    for launcher in LAUNCHERS:
        if not all(name in environment for name in launcher[:4]):
            continue
        rank, num_ranks, local_rank, num_here = (environment[name] for name in launcher[:4])
        if environment.get("RANK") != rank if is_set else num_ranks == "1":
            continue
        address = ""
        if launcher is SRUN:
            if "SLURM_STEP_NODELIST" not in environment:
                continue
            tasks, node = tasks_of_nodes(num_here), int(environment.get("SLURM_NODEID", 0))
            expected = sum(tasks[:node]) + int(local_rank)
            if int(rank) != expected:
                raise ConfigError(
                    f"SLURM_PROCID is {rank} and SLURM_LOCALID {local_rank} on node {node}, but "
                    f"the ranks of a host must be consecutive, which requires SLURM_PROCID "
                    f"{expected}; start them with srun --distribution=block"
                )
            num_here, address = str(tasks[node]), first_node(environment["SLURM_STEP_NODELIST"])
            job = " ".join(environment.get(f"SLURM_{name}_ID", "") for name in ("JOB", "STEP"))
        else:
            job = next((environment[name] for name in JOBS if name in environment), "")
        port = str(FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS)
        for name, value in (
            *(("RANK", rank), ("WORLD_SIZE", num_ranks)),
            *(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", num_here), ("MASTER_PORT", port)),
        ):
            environment.setdefault(name, value)
        if "MASTER_ADDR" not in environment:
            environment["MASTER_ADDR"] = address or _first_host(environment, launcher)
        break
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in environment and other not in environment:
            raise ConfigError(
                f"the environment's {name} is '{environment[name]}', but {other} is not set; set "
                f"both, as torchrun does for each process of a job, or unset {name}"
            )


def _first_host(environment: MutableMapping[str, str], launcher: LauncherVariables) -> str:
    """Return the host of rank 0: this one if all ranks are here, else by the batch job's list."""
    if environment["LOCAL_WORLD_SIZE"] == environment["WORLD_SIZE"]:
        return "127.0.0.1"
    hosts, source = list[str](), ""
    for source in ("PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS", "SLURM_JOB_NODELIST"):
        text = environment.get(source, "")
        if source == "PBS_NODEFILE":  # a line for each rank; on the job's first host alone
            hosts = Path(text).read_text().split() if text and Path(text).is_file() else []
        elif source == "SLURM_JOB_NODELIST":
            hosts = [first_node(text)] if text else []
        else:  # "a 4 b 4", and "a a a a b b b b"
            hosts = [word for word in text.split() if not word.isdecimal()]
        if hosts:
            break
    if not hosts:
        raise ConfigError(
            f"{launcher.num_ranks} is {environment['WORLD_SIZE']} and {launcher.num_here} "
            f"{environment['LOCAL_WORLD_SIZE']}, so the ranks are on several hosts, but no "
            f"variable names the host of rank 0; name it by: {launcher.option}"
        )
    others = [each for each in hosts if each != hosts[0]]
    host = others[0] if launcher.is_first_a_launch_node and others else hosts[0]
    if environment["RANK"] == "0" and not is_here(host):
        raise ConfigError(
            f"rank 0 is on {socket.gethostname()}, but {source} lists {host} first; name the host "
            f"of rank 0 by: {launcher.option.replace('HOST', socket.gethostname())}"
        )
    return host


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
