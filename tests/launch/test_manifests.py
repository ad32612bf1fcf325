"""What `phalanx launch --print` writes starts the job that it was written for."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.slurm_stand_in import options_of, programs, sbatch
from phalanx.cli.main import main
from phalanx.config.file import to_toml
from phalanx.errors import ConfigError
from phalanx.launch.hosts import Host, LaunchRequest, parse_hosts
from phalanx.launch.manifests import text
from phalanx.launch.rank_env import read_rank_env
from ports import reserved_port
from small_run import losses, small_run

REQUEST = LaunchRequest(
    hosts=parse_hosts("a:2,b:2"),
    command=("train", "--strategy", "fsdp4", "--out", "/data/a run"),
    folder="/home/me/job",
    variables=(("NCCL_DEBUG", "INFO"), ("MESSAGE", "it's 5")),
)


# The keys of the published interfaces that a job can need, with the types of their values. Read
# from the Kubernetes API of release 1.31, Kubeflow's training-operator 1.9 and JobSet 0.12; a key
# with "!" is required.
ANY = object()
NAMED = {"name!": str}
CONTAINER = {
    **NAMED,
    **{"image": str, "command": [str], "args": [str], "workingDir": str, "imagePullPolicy": str},
    "env": [{**NAMED, "value": str, "valueFrom": ANY}],
    "ports": [{"containerPort!": int, "name": str, "protocol": str}],
    "resources": {"limits": {"*": str}, "requests": {"*": str}},
    "volumeMounts": [{**NAMED, "mountPath!": str, "subPath": str, "readOnly": bool}],
    "securityContext": ANY,
}
VOLUME = {
    **NAMED,
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
    "emptyDir": {"medium": str, "sizeLimit": str},
    **{"configMap": ANY, "secret": ANY, "hostPath": ANY, "nfs": ANY},
}
POD = {
    "containers!": [CONTAINER],
    "volumes": [VOLUME],
    **{"restartPolicy": str, "terminationGracePeriodSeconds": int, "nodeSelector": {"*": str}},
    **{"hostNetwork": bool, "subdomain": str, "tolerations": ANY, "affinity": ANY},
}
TEMPLATE = {"metadata": ANY, "spec": POD}
JOB = {
    **{"parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int},
    **{"template!": TEMPLATE, "activeDeadlineSeconds": int, "podFailurePolicy": ANY},
}
HEAD = {"apiVersion": str, "kind": str, "metadata": {"name": str}}
REPLICAS = {"replicas": int, "restartPolicy": str, "template": TEMPLATE}
SCHEMAS: dict[str, Any] = {
    "kubeflow.org/v1 PyTorchJob": {
        **HEAD,
        "spec": {
            **{"nprocPerNode": str, "elasticPolicy": ANY},
            "pytorchReplicaSpecs!": {"*": REPLICAS},
            "runPolicy": {
                **{"cleanPodPolicy": str, "backoffLimit": int, "ttlSecondsAfterFinished": int},
                **{"activeDeadlineSeconds": int, "schedulingPolicy": ANY, "suspend": bool},
            },
        },
    },
    "jobset.x-k8s.io/v1alpha2 JobSet": {
        **HEAD,
        "spec": {
            "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": ANY},
            "network": {"enableDNSHostnames": bool, "subdomain": str},
            "replicatedJobs": [
                {**NAMED, "replicas": int, "template!": {"metadata": ANY, "spec": JOB}}
            ],
            **{"startupPolicy": ANY, "successPolicy": ANY, "suspend": bool},
        },
    },
}


def check(value: Any, schema: Any, place: str = "") -> None:
    """Fail if a value lacks a required key, has an unknown one, or a value of another type."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), place
        keys = {key.removesuffix("!"): part for key, part in schema.items()}
        assert {key[:-1] for key in schema if key.endswith("!")} <= value.keys(), place
        for key, part in value.items():
            assert key in keys or "*" in keys, f"{place}: unknown key {key}"
            check(part, keys.get(key, keys.get("*")), f"{place}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), place
        for number, part in enumerate(value):
            check(part, schema[0], f"{place}[{number}]")
    elif schema is not ANY:
        assert type(value) is schema, f"{place}: {value!r} is no {schema.__name__}"


def manifest(kind: str, **changes: Any) -> Any:
    """Return a checked manifest."""
    content = yaml.safe_load(text(kind, replace(REQUEST, **changes)))
    check(content, SCHEMAS[f"{content['apiVersion']} {content['kind']}"])
    return content["spec"]


def test_a_pytorchjob_has_a_pod_for_each_host() -> None:
    spec = manifest("pytorchjob", restarts=3, port=7)
    assert (spec["nprocPerNode"], spec["runPolicy"]["backoffLimit"]) == ("2", 7)
    replicas = spec["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert {each["restartPolicy"] for each in replicas.values()} == {"OnFailure"}
    pod = replicas["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    # The operator looks for both names.
    assert container["name"] == "pytorch"
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 7}]
    assert container["command"][:4] == ["torchrun", "-m", "phalanx", "train"]
    assert container["command"][-4:] == ["--out", "/data/a run", "--resume", "auto"]
    assert {each["name"]: each["value"] for each in container["env"]} == dict(REQUEST.variables)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    paths = [each["mountPath"] for each in container["volumeMounts"]]
    assert paths == ["/home/me/job", "/dev/shm", "/data/a run"]
    on_cpus = ("train", "--out", "../runs", "--device=cpu")
    alone = manifest("pytorchjob", hosts=(Host("a", 8),), command=on_cpus)["pytorchReplicaSpecs"]
    assert list(alone) == ["Master"] and alone["Master"]["restartPolicy"] == "Never"
    (container,) = alone["Master"]["template"]["spec"]["containers"]
    assert "limits" not in container["resources"] and "ports" not in container
    assert container["volumeMounts"][2]["mountPath"] == "/home/me/runs"


def test_a_jobset_numbers_its_pods() -> None:
    spec = manifest("jobset", restarts=3, port=7)
    assert spec["failurePolicy"] == {"maxRestarts": 3}
    ((job,),) = ([each["template"]["spec"] for each in spec["replicatedJobs"]],)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a Job refuses Always
    words = shlex.join(pod["containers"][0]["command"])
    assert words.startswith(
        "torchrun --nnodes 2 --nproc-per-node 2 --node-rank '$(JOB_COMPLETION_INDEX)' "
        "--master-addr phalanx-hosts-0-0.phalanx --master-port 7 -m phalanx train "
    )


def test_yaml_gives_every_word_back() -> None:
    words = ("a: b", "a #b", "- a", "'", '"', "\n", "ü", "")
    job = manifest("jobset", command=("train", "--out", "runs", *words))["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][-10:] == [*words, "--resume", "auto"]


def test_torchrun_reads_its_lines() -> None:
    from torch.distributed.run import get_args_parser

    def parsed(**changes: Any) -> list[Any]:
        printed = text("torchrun", replace(REQUEST, hosts=parse_hosts("a:2,b:1"), **changes))
        lines = [shlex.split(line) for line in printed.splitlines() if line.startswith("cd ")]
        for line in lines:
            assert line[:6] == [
                "cd",
                REQUEST.folder,
                "&&",
                "env",
                "NCCL_DEBUG=INFO",
                "MESSAGE=it's 5",
            ]
        return [get_args_parser().parse_args(line[line.index("torchrun") + 1 :]) for line in lines]

    for node, options in enumerate(parsed(port=7)):
        assert (options.nnodes, options.nproc_per_node) == ("2", ("2", "1")[node])
        assert (options.node_rank, options.master_addr, options.master_port) == (node, "a", 7)
        assert options.training_script_args == list(REQUEST.command)
    for node, options in enumerate(parsed(restarts=3)):
        assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "a:29500")
        assert (options.rdzv_conf, options.max_restarts) == (f"is_host={1 - node}", 3)
        assert options.training_script_args == [*REQUEST.command, "--resume", "auto"]
    (first, _) = parsed(command=("run", "my.py", "--", "-x"))
    assert (first.module, first.training_script, first.training_script_args) == (
        *(False, "my.py"),
        ["-x"],
    )


def test_each_rank_has_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = text("env", replace(REQUEST, hosts=parse_hosts("a:2,b:1"))).split("\n\n")
    ranks: list[tuple[int, ...]] = []
    for part in parts:
        for line in part.splitlines():
            if line.startswith("export "):
                monkeypatch.setenv(*shlex.split(line)[1].split("=", 1))
        env = read_rank_env()
        ranks.append((env.rank, env.num_ranks, env.local_rank, env.num_here))
        assert (os.environ["MASTER_ADDR"], os.environ["MESSAGE"]) == ("a", "it's 5")
        assert part.splitlines()[-1] == "phalanx train --strategy fsdp4 --out '/data/a run'"
    assert ranks == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_the_image_has_the_versions_of_this_process() -> None:
    from importlib import metadata

    torch = metadata.version("torch").partition("+")[0]
    lines = text("dockerfile", REQUEST).splitlines()
    assert f"RUN pip install --no-cache-dir torch=={torch}" in lines
    on_cpus = replace(REQUEST, command=(*REQUEST.command, "--device", "cpu"))
    assert f"torch=={torch} --index-url https://download.pytorch.org/whl/cpu" in text(
        "dockerfile", on_cpus
    )
    for line in lines:  # what it copies is in a clone
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert (Path(__file__).parents[2] / name).exists(), name


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("slurm", {"hosts": parse_hosts("a:2,b")}, "host b has no number of ranks.* as b:2$"),
        (
            "jobset",
            {"hosts": parse_hosts("a:2,b:4")},
            "a:2,b:4, but .* give each host 4 ranks, or 2",
        ),
        ("torchrun", {"min_ranks": 2}, "--min-ranks is 2, but what --print torchrun writes"),
        ("env", {"restarts": 1}, "--restarts is 1, but nobody restarts"),
        ("slurm", {"command": ("train",)}, "phalanx train, without --out, .*; add --out FOLDER"),
        ("env", {"command": ("run", "my.py", "--strategy", "dp4")}, r"expected run SCRIPT \[-- "),
    ],
)
def test_what_a_text_cannot_say_is_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        text(kind, replace(REQUEST, **changes))


def test_the_command_line_prints_what_it_is_told_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    words = "launch --hosts a:1,b:1 --env NCCL_DEBUG=INFO --print env -- train --out runs".split()
    assert main(words) == 0
    request = LaunchRequest(
        hosts=parse_hosts("a:1,b:1"),
        **{"command": ("train", "--out", "runs"), "folder": os.getcwd()},
        variables=(("NCCL_DEBUG", "INFO"),),
    )
    assert capsys.readouterr().out == text("env", request)


@pytest.mark.parametrize(
    ("code", "count", "is_queued"),
    [(143, 9, True), (1, 2, True), (1, 3, False), (2, 0, False), (0, 0, False)],
)
def test_slurm_queues_again_what_its_time_or_a_loss_has_ended(
    code: int, count: int, is_queued: bool, tmp_path: Path
) -> None:
    script = text("slurm", replace(REQUEST, folder=str(tmp_path), restarts=3, port=7))
    options = options_of(script)
    sizes = ("nodes", "ntasks-per-node", "gpus-per-node")
    assert [options[name] for name in sizes] == ["2", "2", "2"]
    uneven = options_of(text("slurm", replace(REQUEST, hosts=parse_hosts("a:2,b:1"))))
    assert (uneven["ntasks"], "ntasks-per-node" in uneven) == ("3", False)
    for name, end in (("srun", f"exit {code}"), ("scontrol", "")):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" "$MESSAGE $MASTER_PORT"\n{end}\n')
        program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **{"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(count)},
    }
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    queued = ["scontrol requeue 77 it's 5 7"] if is_queued else []
    how = "--strategy fsdp4 --out /data/a run --resume auto it's 5 7"
    options = "--cpus-per-task=8 --distribution=block"
    assert done.stdout.splitlines() == [f"srun {options} phalanx train {how}", *queued]
    assert done.returncode == code


@pytest.fixture
def job(tmp_path: Path) -> Generator[Callable[..., LaunchRequest]]:
    """Yield a function from hosts, strategy, run and options to a job of a small model."""
    from phalanx.train.job.resume import stored_settings

    programs(tmp_path / "bin")
    config = small_run(tmp_path, device="cpu", out=None)
    (tmp_path / "run.toml").write_text(to_toml(stored_settings(config)))

    with reserved_port() as port:

        def request(hosts: tuple[Host, ...], strategy: str, out: str, *sizes: str) -> LaunchRequest:
            words = ("train", "--config=run.toml", "--strategy", strategy, "--out", out, *sizes)
            return LaunchRequest(hosts=hosts, command=words, folder=str(tmp_path), port=int(port))

        yield request


def run_shells(parts: list[str], folder: Path) -> None:
    """Run each text in a shell of its own, at once."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    shells = [
        subprocess.Popen(["bash", "-c", part], env=environment, start_new_session=True)
        for part in parts
    ]
    try:
        assert [shell.wait(280) for shell in shells] == [0] * len(parts)
    finally:
        for shell in shells:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()


@pytest.mark.slow
def test_torchrun_and_env_start_the_job(job: Callable[..., LaunchRequest], tmp_path: Path) -> None:
    sizes = ("--steps", "4", "--batch.global-size", "6", "--batch.microbatch", "1")
    hosts = (Host("localhost", 2), Host("127.0.0.1", 1))
    for kind in ("torchrun", "env"):
        printed = text(kind, job(hosts, "dp3", kind, *sizes))
        run_shells(printed.split("\n\n"), tmp_path)
    again = replace(job(hosts, "dp3", "again", *sizes), restarts=1)
    run_shells(text("torchrun", again).split("\n\n"), tmp_path)
    expected = losses(tmp_path / "torchrun")
    assert len(expected) == 4
    assert losses(tmp_path / "env") == losses(tmp_path / "again") == expected


def pods_of(kind: str, request: LaunchRequest) -> list[str]:
    """Return for each pod of a manifest the command that its container runs, on this host."""
    spec = yaml.safe_load(text(kind, request))["spec"]
    if kind == "jobset":
        job = spec["replicatedJobs"][0]["template"]["spec"]
        pods = [job["template"]["spec"]] * job["completions"]
    else:
        replicas = [spec["pytorchReplicaSpecs"][name] for name in ("Master", "Worker")]
        pods = [each["template"]["spec"] for each in replicas for _ in range(each["replicas"])]
    texts: list[str] = []
    for index, pod in enumerate(pods):
        container = pod["containers"][0]
        variables = {each["name"]: each["value"] for each in container["env"]}
        if kind == "pytorchjob":  # what the operator sets
            variables |= {"PET_NNODES": str(len(pods)), "PET_NPROC_PER_NODE": spec["nprocPerNode"]}
            variables |= {"PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "localhost"}
            variables |= {"PET_MASTER_PORT": str(request.port), "WORLD_SIZE": "2", "RANK": "7"}
        line = shlex.join(container["command"]).replace("phalanx-hosts-0-0.phalanx", "localhost")
        line = line.replace("'$(JOB_COMPLETION_INDEX)'", str(index))
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        texts.append("\n".join([f"cd {container['workingDir']}", *exports, line]))
    return texts


@pytest.mark.slow
def test_pods_start_the_job(job: Callable[..., LaunchRequest], tmp_path: Path) -> None:
    hosts = (Host("a", 1), Host("b", 1))
    for kind in ("pytorchjob", "jobset"):
        run_shells(pods_of(kind, job(hosts, "fsdp2", kind, "--steps", "4")), tmp_path)
    assert losses(tmp_path / "jobset") == losses(tmp_path / "pytorchjob")
    assert len(losses(tmp_path / "jobset")) == 4


@pytest.mark.slow
def test_a_job_of_slurm_continues_after_its_time(
    job: Callable[..., LaunchRequest], tmp_path: Path
) -> None:
    hosts, run = (Host("localhost", 2),), tmp_path / "slurm"

    def has_trained() -> bool:
        return (run / "metrics.jsonl").exists() and len(losses(run)) >= 2

    script = text("slurm", job(hosts, "fsdp2", "slurm", "--steps", "40"))
    assert sbatch(script, tmp_path, has_trained) == [143, 0], (
        tmp_path / "phalanx-77.out"
    ).read_text()
    whole = text("env", job(hosts, "fsdp2", "whole", "--steps", "40"))
    run_shells(whole.split("\n\n"), tmp_path)
    assert len(losses(run)) == 40
    assert losses(run) == losses(tmp_path / "whole")
