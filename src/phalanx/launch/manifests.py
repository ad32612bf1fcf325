"""Write scripts and manifests that start a job where `phalanx launch` cannot, by schedulers.

    kind          text                                  who numbers the ranks
    torchrun      a command line for each host          torchrun, from --node-rank
    env           variables and a command a rank        the variables
    slurm         a script for sbatch                   srun, read by `schedulers`
    pytorchjob    Kubeflow's PyTorchJob, v1             the operator the pods, torchrun the ranks
    jobset        Kubernetes' JobSet, v1alpha2          the pod's index, torchrun the ranks
    dockerfile    the image of the pods

A scheduler ends a job by SIGTERM, upon which the ranks save, and starts the job again, upon which
`--resume auto` continues it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from os.path import normpath
from pathlib import PurePosixPath
from typing import Any, Final

from phalanx.errors import ConfigError
from phalanx.launch.hosts import LaunchRequest

PORT: Final = 29500
"""Port of the job's store, if the request names none."""

CORES: Final = 8
"""Cores of a rank, which the reader changes to what the hosts have."""

STOP_S: Final = 120
"""Seconds from SIGTERM to the end, in which the ranks save."""

NAME: Final = "phalanx"


def text(kind: str, request: LaunchRequest) -> str:
    """Return the text of one of KINDS for a job.

    Raises:
        ConfigError: a host lacks its number of ranks, hosts differ in it that
            a manifest must make equal, or the text has no place for a setting of the request.
    """
    numbers = sorted(host.num_ranks for host in request.hosts)
    if numbers[0] == 0 and kind != "dockerfile":
        name = next(host.name for host in request.hosts if not host.num_ranks)
        raise ConfigError(
            f"host {name} has no number of ranks, which --print {kind} needs; give each host its "
            f"number, as {name}:2"
        )
    if numbers[0] != numbers[-1] and kind in ("pytorchjob", "jobset"):
        raise ConfigError(
            f"hosts are {','.join(map(str, request.hosts))}, but the pods of --print {kind} are "
            f"alike; give each host {numbers[-1]} ranks, or {numbers[0]}"
        )
    if request.min_ranks is not None:
        raise ConfigError(
            f"--min-ranks is {request.min_ranks}, but what --print {kind} writes continues on all "
            "hosts or not at all; leave it out"
        )
    if request.restarts and kind == "env":
        raise ConfigError(
            f"--restarts is {request.restarts}, but nobody restarts processes that were started by "
            "hand; leave it out"
        )
    return KINDS[kind](request)


def _torchrun(request: LaunchRequest) -> str:
    """Return a line for each host; with restarts the hosts meet anew, by the c10d rendezvous."""
    first, port = request.hosts[0].name, request.port or PORT
    variables = [f"{name}={value}" for name, value in request.variables]
    parts: list[str] = []
    for node, host in enumerate(request.hosts):
        if request.restarts:
            # A host whose own /etc/hosts maps its name to 127.0.1.1 needs is_host.
            meeting = f"--rdzv-backend c10d --rdzv-id {NAME} --rdzv-endpoint {first}:{port}"
            meeting += f" --rdzv-conf is_host={int(node == 0)} --max-restarts {request.restarts}"
        else:
            meeting = f"--node-rank {node} --master-addr {first} --master-port {port}"
        words = [
            *(["env", *variables] if variables else []),
            *("torchrun", "--nnodes", str(len(request.hosts))),
            *("--nproc-per-node", str(host.num_ranks), *meeting.split()),
            *_target(request, resumes=request.restarts > 0),
        ]
        folder = shlex.quote(request.folder)
        parts.append(f"# on {host.name}\ncd {folder} && {shlex.join(words)}\n")
    return "\n".join(parts)


def _env(request: LaunchRequest) -> str:
    """Return the variables and the command of each rank, for a shell of its own."""
    ranks = [(host, local) for host in request.hosts for local in range(host.num_ranks)]
    parts: list[str] = []
    for rank, (host, local_rank) in enumerate(ranks):
        variables = (
            *(("RANK", rank), ("WORLD_SIZE", len(ranks))),
            *(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", host.num_ranks)),
            *(("MASTER_ADDR", request.hosts[0].name), ("MASTER_PORT", request.port or PORT)),
            *request.variables,
        )
        lines = [
            f"# rank {rank}, on {host.name}, in a shell of its own",
            f"cd {shlex.quote(request.folder)}",
            *(f"export {name}={shlex.quote(str(value))}" for name, value in variables),
            _command(request, resumes=False),
        ]
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _slurm(request: LaunchRequest) -> str:
    """Return a script for sbatch: a task a rank; what SIGTERM has ended is queued again."""
    most = max(host.num_ranks for host in request.hosts)
    is_even = most * len(request.hosts) == request.num_ranks
    options = [
        f"--job-name={NAME}",
        f"--nodes={len(request.hosts)}",
        f"--ntasks-per-node={most}" if is_even else f"--ntasks={request.num_ranks}",
        *([] if _option(request, "--device") == "cpu" else [f"--gpus-per-node={most}"]),
        f"--cpus-per-task={CORES}",
        "--time=04:00:00",
        f"--signal=TERM@{STOP_S}",  # to the ranks; B:TERM would reach this script alone
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
    ]
    again = '    scontrol requeue "$SLURM_JOB_ID"'
    variables = (
        *request.variables,
        *([("MASTER_PORT", str(request.port))] if request.port else ()),
    )
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"# only on these: sbatch --nodelist={','.join(each.name for each in request.hosts)}",
        f"cd {shlex.quote(request.folder)} || exit 2",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables),
        # Since Slurm 22.05 srun does not read the script's --cpus-per-task.
        f"srun --cpus-per-task={CORES} --distribution=block {_command(request, resumes=True)}",
        "code=$?",
        "if [ $code = 143 ]; then  # SIGTERM came before the end, and the ranks have saved",
        again,
    ]
    if request.restarts:  # 2 is a wrong request
        count = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {request.restarts} ]'
        lines += [f"elif [ $code != 0 ] && [ $code != 2 ] && {count}; then", again]
    return "\n".join([*lines, "fi", "exit $code", ""])


def _pytorchjob(request: LaunchRequest) -> str:
    """Return a PyTorchJob; the operator gives torchrun its options as variables PET_*."""
    num_hosts = len(request.hosts)
    pod = _pod(request, "pytorch", ["torchrun", *_target(request, resumes=True)])
    if request.port:  # the operator looks for this name
        pod["containers"][0]["ports"] = [{"name": "pytorchjob-port", "containerPort": request.port}]
    policy = "OnFailure" if request.restarts else "Never"
    replicas = {
        role: {"replicas": number, "restartPolicy": policy, "template": {"spec": pod}}
        for role, number in (("Master", 1), ("Worker", num_hosts - 1))
        if number
    }
    spec = {
        "nprocPerNode": str(request.hosts[0].num_ranks),
        # A loss restarts the container of each pod, and the operator counts all.
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": request.restarts * num_hosts + 1},
        "pytorchReplicaSpecs": replicas,
    }
    return _manifest("kubeflow.org/v1", "PyTorchJob", spec)


def _jobset(request: LaunchRequest) -> str:
    """Return a JobSet of one indexed Job, whose pods have names under a headless service."""
    num_hosts, master = len(request.hosts), f"{NAME}-hosts-0-0.{NAME}"
    # Kubernetes sets the variable for each pod of an indexed Job, and replaces it in the command.
    options = f"--nnodes {num_hosts} --nproc-per-node {request.hosts[0].num_ranks} --node-rank "
    options += f"$(JOB_COMPLETION_INDEX) --master-addr {master} --master-port "
    options += str(request.port or PORT)
    pod = _pod(request, "ranks", ["torchrun", *options.split(), *_target(request, resumes=True)])
    job = {
        "parallelism": num_hosts,
        "completions": num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    spec = {
        "failurePolicy": {"maxRestarts": request.restarts},
        "network": {"enableDNSHostnames": True, "subdomain": NAME},
        "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": job}}],
    }
    return _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _dockerfile(request: LaunchRequest) -> str:
    """Return a Dockerfile with the versions of this process."""
    torch = metadata.version("torch").partition("+")[0]
    is_on_cpu = _option(request, "--device") == "cpu"
    index = " --index-url https://download.pytorch.org/whl/cpu" if is_on_cpu else ""
    return f"""\
# In a clone of Phalanx: docker build --tag {_image()} --file Dockerfile .
FROM python:{sys.version_info.major}.{sys.version_info.minor}-slim
RUN pip install --no-cache-dir torch=={torch}{index}
COPY pyproject.toml README.md LICENSE constraints.txt /opt/phalanx/
COPY src /opt/phalanx/src
RUN pip install --no-cache-dir --constraint /opt/phalanx/constraints.txt /opt/phalanx
"""


def _target(request: LaunchRequest, *, resumes: bool) -> list[str]:
    """Return the words of one rank as torchrun reads them: -m and a module, or a script."""
    verb, *words = request.command
    if verb == "run":
        if len(words) > 1 and words[1] != "--":
            raise ConfigError(
                f"the command is {request.command_text}, but other launchers run the script "
                "itself; expected run SCRIPT [-- WORDS], with the options in phalanx.init"
            )
        return [words[0], *words[2:]]
    resumes &= verb == "train" and not _option(request, "--resume")
    if resumes and not (_option(request, "--out") or _option(request, "--config")):
        raise ConfigError(
            f"the command is {request.command_text}, without --out, in which a job that is started "
            "again finds its state; add --out FOLDER, a folder that all hosts share"
        )
    return ["-m", "phalanx", *request.command, *(("--resume", "auto") if resumes else ())]


def _command(request: LaunchRequest, *, resumes: bool) -> str:
    """Return the command of a rank that knows its number, as a shell reads it."""
    target = _target(request, resumes=resumes)
    return shlex.join(target[1:] if target[0] == "-m" else ["python", *target])


def _option(request: LaunchRequest, name: str) -> str:
    """Return the value of an option of the command, or an empty string."""
    for word, after in zip(request.command, (*request.command[1:], ""), strict=True):
        option, equals, value = word.partition("=")
        if option == name:
            return value if equals else after
    return ""


def _image() -> str:
    return f"phalanx-train:{metadata.version('phalanx-train')}"


def _pod(request: LaunchRequest, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the specification of a pod: a host with its ranks, and the folder that all share."""
    num_ranks = request.hosts[0].num_ranks
    resources = {"requests": {"cpu": str(num_ranks * CORES)}}
    if _option(request, "--device") != "cpu":
        resources["limits"] = {"nvidia.com/gpu": str(num_ranks)}
    mounts = [
        {"name": "folder", "mountPath": request.folder},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # 64 MB without it
    ]
    out = PurePosixPath(normpath(PurePosixPath(request.folder, _option(request, "--out"))))
    if not out.is_relative_to(request.folder):
        mounts.append({"name": "folder", "mountPath": str(out), "subPath": out.name})
    container = {
        "name": name,
        "image": _image(),
        "command": list(words),
        "workingDir": request.folder,
        "env": [{"name": variable, "value": value} for variable, value in request.variables],
        "resources": resources,
        "volumeMounts": mounts,
    }
    return {
        "terminationGracePeriodSeconds": STOP_S,
        "containers": [container],
        "volumes": [
            {"name": "folder", "persistentVolumeClaim": {"claimName": NAME}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _manifest(version: str, kind: str, spec: dict[str, Any]) -> str:
    """Return a manifest of Kubernetes as YAML, which reads JSON, after what it requires."""
    content = {"apiVersion": version, "kind": kind, "metadata": {"name": NAME}, "spec": spec}
    return f"""\
# image: the Dockerfile of --print dockerfile, as {_image()}, in your registry
# volume: a PersistentVolumeClaim {NAME}, ReadWriteMany, with the data and --out
{json.dumps(content, indent=2, ensure_ascii=False)}
"""


KINDS: Final[Mapping[str, Callable[[LaunchRequest], str]]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "pytorchjob": _pytorchjob,
    "jobset": _jobset,
    "env": _env,
    "dockerfile": _dockerfile,
}
"""Kind of text -> the function that writes it."""
