"""The variables of Slurm and of MPI's launchers stand for torchrun's."""

import os
import socket
from pathlib import Path
from unittest.mock import patch

import pytest

from phalanx.errors import ConfigError
from phalanx.launch import torchrun
from phalanx.launch.schedulers import adopt, first_node, tasks_of_nodes

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
}


def test_a_task_of_srun_is_a_rank() -> None:
    environment = dict(SRUN)
    adopt(environment)
    assert {name: value for name, value in environment.items() if name not in SRUN} == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "23046",
    }


def test_what_is_set_stays() -> None:
    given = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
    adopt(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"], given["LOCAL_RANK"]) == (
        "10.0.0.1",
        "5",
        "1",
    )


def test_a_rank_of_torchrun_in_a_task_is_torchruns() -> None:
    by_torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    environment = {**SRUN, **by_torchrun, "MASTER_ADDR": "b", "MASTER_PORT": "1"}
    before = dict(environment)
    adopt(environment)
    assert environment == before
    own = {**SRUN, "RANK": "5", "WORLD_SIZE": "6"}  # as scripts of srun set them by hand
    adopt(own)
    assert (own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"]) == ("1", "2")


@pytest.mark.parametrize(
    "environment",
    [
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},  # the script of sbatch
        # Some containers keep a part of the variables.
        dict.fromkeys(SRUN.keys() - {"SLURM_STEP_TASKS_PER_NODE"}, "0"),
        {},
    ],
)
def test_a_single_task_starts_ranks_of_its_own(environment: dict[str, str]) -> None:
    before = dict(environment)
    adopt(environment)
    assert environment == before


def test_ranks_dealt_out_over_the_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="srun --distribution=block"):
        adopt({**SRUN, "SLURM_PROCID": "3"})


HERE = socket.gethostname()
OF_ONE = ("5", "8", "1", "4")
"""Rank, ranks, rank on the host, ranks of the host."""

MPI = {
    "jsrun": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "JSM_NAMESPACE_"),
    "Open MPI": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "OMPI_COMM_WORLD_"),
    "MVAPICH": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MV2_COMM_WORLD_"),
    "Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    "PALS": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "PMI_"),
}
"""Launcher -> ends and beginning of its variables."""


def of_mpi(launcher: str, values: tuple[str, ...] = OF_ONE) -> dict[str, str]:
    """Return what a launcher sets for a rank."""
    *ends, begin = MPI[launcher]
    return {begin + end: value for end, value in zip(ends, values, strict=True)}


@pytest.mark.parametrize("launcher", MPI)
def test_a_process_of_mpi_is_a_rank(launcher: str) -> None:
    hosts = {"LSB_MCPU_HOSTS": "launch1 1 a 4 b 4", "LSB_JOBID": "7"}
    environment = of_mpi(launcher) | hosts
    # mpirun starts its daemons by srun: the variables of the daemons are no rank's
    environment |= {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    environment["SLURM_LOCALID"] = "0"
    before = dict(environment)
    adopt(environment)
    assert {name: value for name, value in environment.items() if name not in before} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a" if launcher == "jsrun" else "launch1",  # jsrun: no rank on the first
        "MASTER_PORT": "21346",
    }


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ({"PBS_NODEFILE": "nodes", "LSB_HOSTS": "z z"}, "node1"),
        ({"PBS_NODEFILE": "missing", "LSB_HOSTS": "c c d d"}, "c"),  # it is on one host alone
        ({"LSB_MCPU_HOSTS": "c 4 d 4"}, "c"),
        ({"SLURM_JOB_NODELIST": "gpu[07-08]"}, "gpu07"),
        ({"MASTER_ADDR": "e", "LSB_HOSTS": "c"}, "e"),
    ],
)
def test_rank_0_is_on_the_first_host_of_the_job(
    hosts: dict[str, str], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    environment = of_mpi("Open MPI") | hosts
    adopt(environment)
    assert environment["MASTER_ADDR"] == first


def test_ranks_of_one_host_need_no_list() -> None:
    environment = of_mpi("Intel MPI", ("1", "2", "1", "2"))
    adopt(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    alone = of_mpi("Open MPI", ("0", "1", "0", "1"))  # starts ranks of its own
    adopt(alone)
    assert "RANK" not in alone
    adopt(inner := alone | SRUN)
    assert inner["RANK"] == SRUN["SLURM_PROCID"]


def test_an_unknown_or_wrong_host_of_rank_0_is_refused() -> None:
    environment = of_mpi("Open MPI")
    with pytest.raises(ConfigError, match=r"by: mpirun -x MASTER_ADDR=HOST$"):
        adopt(environment)
    assert environment["RANK"] == "5"  # so that one rank of a host reports it
    first = of_mpi("Intel MPI", ("0", "8", "0", "4"))
    with pytest.raises(ConfigError, match=rf"lists 192.0.2.77 first; .* -genv MASTER_ADDR {HERE}$"):
        adopt(first | {"LSB_HOSTS": "192.0.2.77 192.0.2.78"})
    adopt(own := first | {"LSB_HOSTS": "localhost b"})
    assert own["MASTER_ADDR"] == "localhost"


def test_one_rank_of_a_host_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(torchrun, "leave", leave)
    monkeypatch.setattr(torchrun, "ignore", lambda: None)
    monkeypatch.setattr(torchrun, "QUIET_S", 0.0)
    for rank, code in ((4, 2), (5, 1)):
        variables = of_mpi("Open MPI", (str(rank), "8", str(rank - 4), "4"))
        with patch.dict(os.environ, variables), pytest.raises(SystemExit) as end:
            torchrun.run_verb(lambda: None, lambda _: 0)
        assert end.value.code == code
    assert capsys.readouterr().err.count("names the host of rank 0") == 1


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("node-3,node-4", "node-3"),
        ("a1", "a1"),
        ("rack[1-2]-n", "rack1-n"),
    ],
)
def test_the_first_node(text: str, first: str) -> None:
    assert first_node(text) == first
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
