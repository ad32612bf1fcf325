"""Slurm's variables stand for torchrun's."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.slurm import adopt, first_node, tasks_of_nodes

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
        "MASTER_PORT": "21968",
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


TRAIN = Path(__file__).parents[2] / "docs" / "quick_start.md"


@pytest.mark.parametrize("code", [143, 1, 0])
def test_the_script_of_the_page_queues_again_what_its_time_has_ended(
    code: int, tmp_path: Path
) -> None:
    (script,) = re.findall(
        r"```sh [^\n]*\n(#!/bin/bash\n#SBATCH.*?)```", TRAIN.read_text(), re.DOTALL
    )
    for name, end in (("srun", f"exit {code}"), ("scontrol", "")):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n{end}\n')
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "SCRATCH": str(tmp_path), "SLURM_JOB_ID": "77"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    run = f"{tmp_path}/runs/llama"
    queued = ["scontrol requeue 77"] if code == 143 else []
    command = f"srun phalanx train --config run.toml --out {run} --resume auto"
    assert done.stdout.splitlines() == [command, *queued]
    assert done.returncode == code


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
