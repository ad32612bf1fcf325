"""`phalanx launch --hosts a:2,b:2 -- train ...`: run a command of phalanx on several hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.launch.hosts import LaunchRequest, parse_host, parse_hosts, read_hostfile
from phalanx.launch.launched import VARIABLE

TAKEN_ALONG: Final = re.compile("(PHALANX|NCCL|GLOO|TORCH|OMP|MKL|HF|CUDA)_.*")
"""Names of the environment variables that the ranks of all hosts get."""

OF_SYSTEM: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
"""Those that they get by ssh, but that no other way of starting them should take from here."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Run a command of phalanx on several hosts by ssh: phalanx launch --hosts a:2,b:2 -- train.

    Words after -- are the command: train, run SCRIPT, verify or bench scaling. Each host needs this
    working folder and the same Python environment at the same path. Nothing is left running.
    """

    hosts: str | None = None
    """Hosts and their ranks: a:2,user@b:2, or localhost:4; without a number the devices decide."""
    hostfile: str | None = None
    """File with a host a line, as of DeepSpeed and MPI: a slots=2."""
    restarts: Annotated[int, Range(0, 10**6)] = 0
    """How often the job continues, from its last state, after a rank or host is lost."""
    min_ranks: Annotated[int | None, Range(1)] = None
    """Fewest ranks on which it continues; unset: more than half of them."""
    env: list[str] = field(default_factory=list[str])
    """A further environment variable for the ranks, NAME or NAME=VALUE; may be repeated."""
    ssh: str = "ssh"
    """The command ssh, with options, such as "ssh -p 2222"."""
    port: Annotated[int | None, Range(1, 65535, "[]")] = None
    """Port of the first host by which the ranks meet; unset: a free one."""
    dry_run: bool = False
    """Print what would be run on each host."""
    print: Literal["torchrun", "slurm", "pytorchjob", "jobset", "env", "dockerfile"] | None = None
    """Print a script or manifest that starts the job by other means, with variables of --env."""
    join: str | None = None
    """Take a host, c:2, into the job that runs on this machine, at the end of a step."""
    job: Annotated[int | None, Range(1)] = None
    """Process of the launcher that --join means, if several run on this machine."""


def run(argv: list[str]) -> int:
    """Launch the command, print how else to launch it, or let a host join a running job.

    Raises:
        ConfigError: hosts, command or variables are wrong, or a host cannot take part.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    config = read_command_line(argv[:at], LaunchConfig, prog="phalanx launch")
    if config.join is not None:
        from phalanx.launch.launcher import join

        if refusal := join(parse_host(config.join), config.job):
            raise ConfigError(refusal)
        print(f"{config.join} joins at the end of a step")
        return 0
    request = request_of(config, tuple(argv[at + 1 :]))
    if config.print is not None:
        from phalanx.launch import manifests

        print(manifests.text(config.print, request), end="")
        return 0
    from phalanx.launch.launcher import JobLauncher, dry_run

    if config.dry_run:
        print("\n".join(dry_run(request)))
        return 0
    return JobLauncher(request).run()


def _succeed() -> int:
    """Run a launcher in place of a lost one, whose state standard input has."""
    from phalanx.cli.main import main
    from phalanx.launch.launcher import JobLauncher, read_state

    state = json.load(sys.stdin)
    return main([], lambda _: JobLauncher(*read_state(state)).run())


def request_of(config: LaunchConfig, command: tuple[str, ...]) -> LaunchRequest:
    """Return the job that a command line asks for; raise ConfigError if it asks for none."""
    if (config.hosts is None) == (config.hostfile is None):
        raise ConfigError("expected either --hosts a:2,b:2 or --hostfile FILE")
    hosts = (
        read_hostfile(Path(config.hostfile or ""))
        if config.hosts is None
        else parse_hosts(config.hosts)
    )
    is_known = command[:1] in (("train",), ("run",), ("verify",))
    if not is_known and command[:2] != ("bench", "scaling"):
        words = f"'{shlex.join(command[:2])}'" if command else "nothing"
        raise ConfigError(
            f"the command after -- is {words}; expected train, run SCRIPT, verify or bench "
            "scaling, such as: phalanx launch --hosts a:2,b:2 -- train --strategy dp4"
        )
    variables = dict[str, str]()
    if config.print is None:  # a text may go anywhere: no HF_TOKEN, and no PATH of this machine
        for name, value in os.environ.items():
            if TAKEN_ALONG.fullmatch(name) or name in OF_SYSTEM:
                variables[name] = value
    for word in config.env:
        name, has_value, value = word.partition("=")
        if not has_value and name not in os.environ:
            raise ConfigError(f"--env {name}: the environment has no {name}; write {name}=VALUE")
        variables[name] = value if has_value else os.environ[name]
    for name in (VARIABLE, "TORCH_CPP_LOG_LEVEL"):  # which `phalanx` itself has set
        variables.pop(name, None)
    try:
        ssh = tuple(shlex.split(config.ssh))
    except ValueError as error:
        raise ConfigError(f"--ssh is {config.ssh!r}: {error}; expected a command") from None
    return LaunchRequest(
        hosts=hosts,
        command=command,
        folder=os.getcwd(),
        restarts=config.restarts,
        min_ranks=config.min_ranks,
        ssh=ssh or ("ssh",),
        variables=tuple(sorted(variables.items())),
        port=config.port or 0,
    )


if __name__ == "__main__":
    sys.exit(_succeed())
