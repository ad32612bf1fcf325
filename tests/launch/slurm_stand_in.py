"""sbatch, srun and scontrol on this host: they do with a script what Slurm does with it.

sbatch    reads the #SBATCH lines, runs the script, sends the signal of --signal, and runs the
          script again if scontrol has queued it again
srun      starts a task for each of --ntasks or --ntasks-per-node, with Slurm's variables
scontrol  requeue JOB
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KNOWN = (
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"),
    *("signal", "requeue", "open-mode", "output"),
)


def options_of(script: str) -> dict[str, str]:
    """Return the options of the #SBATCH lines, which end at the first command."""
    words: list[str] = []
    for line in script.splitlines()[1:]:
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            words += shlex.split(line.removeprefix("#SBATCH "))
    pairs = [word.removeprefix("--").partition("=") for word in words]
    assert {name for name, _, _ in pairs} <= set(KNOWN), words
    return {name: value for name, _, value in pairs}


def programs(folder: Path) -> Path:
    """Write srun, scontrol, phalanx and torchrun into a folder, and return it."""
    folder.mkdir()
    for name, words in (
        ("srun", [__file__, "srun"]),
        ("scontrol", [__file__, "scontrol"]),
        ("phalanx", ["-m", "phalanx"]),
        ("torchrun", ["-m", "torch.distributed.run"]),
    ):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def sbatch(script: str, folder: Path, is_near_end: Callable[[], bool]) -> list[int]:
    """Run a script as a job until it is not queued again; return the exit codes of its runs.

    `is_near_end` says in the first run that its time is nearly over.
    """
    options = options_of(script)
    path = folder / "script.sh"
    path.write_text(script)
    output = folder / options["output"].replace("%x", options["job-name"]).replace("%j", "77")
    most = int(options["nodes"]) * int(options.get("ntasks-per-node", 0))
    codes: list[int] = []
    queued = folder / "queued"
    queued.touch()
    while queued.exists():
        queued.unlink()
        environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "STAND_IN": str(folder),
            "SLURM_JOB_ID": "77",
            "SLURM_RESTART_COUNT": str(len(codes)),
            "SLURM_NNODES": options["nodes"],
            "SLURM_NTASKS": options.get("ntasks") or str(most),
        }
        mode = "a" if options.get("open-mode") == "append" else "w"
        with output.open(mode) as out:
            job = subprocess.Popen(
                ["bash", path], env=environment, stdout=out, stderr=out, start_new_session=True
            )
        try:
            while not codes and job.poll() is None and not is_near_end():
                time.sleep(0.01)
            if not codes and job.poll() is None:
                name, _, _ = options["signal"].rpartition("@")
                receivers = [job.pid]
                if not name.startswith("B:"):  # the tasks, and not the script
                    receivers = [int(pid) for pid in (folder / "pids").read_text().split()]
                for pid in receivers:
                    os.kill(pid, getattr(signal, f"SIG{name.removeprefix('B:')}"))
            job.wait(280)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        codes.append(job.returncode)
        assert not queued.exists() or "requeue" in options
    return codes


def _srun(words: list[str]) -> int:
    while words[0].startswith("--"):
        words = words[1:]
    num_nodes, num_tasks = (int(os.environ[f"SLURM_{name}"]) for name in ("NNODES", "NTASKS"))
    each = num_tasks // num_nodes
    tasks = [
        subprocess.Popen(
            words,
            env={
                **os.environ,
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task % each),
                "SLURM_NODEID": str(task // each),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": str(num_tasks),
                "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{num_nodes})",
                "SLURM_STEP_NODELIST": "localhost",
            },
        )
        for task in range(num_tasks)
    ]
    (Path(os.environ["STAND_IN"]) / "pids").write_text(" ".join(str(task.pid) for task in tasks))
    return max(code if code >= 0 else 128 - code for code in [task.wait() for task in tasks])


def _scontrol(words: list[str]) -> int:
    assert words == ["requeue", os.environ["SLURM_JOB_ID"]]
    (Path(os.environ["STAND_IN"]) / "queued").touch()
    return 0


if __name__ == "__main__":
    sys.exit({"srun": _srun, "scontrol": _scontrol}[sys.argv[1]](sys.argv[2:]))
