"""The roles of a job as processes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import TrainingError
from phalanx.launch.heartbeat import PULSE
from phalanx.server.coordinator import Coordinator
from phalanx.server.requests import JobAddress
from phalanx.server.role import Role
from phalanx.server.secret import Secret
from phalanx.server.shard_server import Server
from phalanx.server.task_scheduler import TaskScheduler
from phalanx.server.wire import Log


@dataclass(frozen=True)
class JobRoles:
    """The parameters of all roles of a job.

    Attributes:
        job: name of the job.
        meeting: address of the coordinator, and the secret.
        journal: path of the coordinator's journal.
        num_servers: number of servers that the coordinator waits for.
    """

    job: str
    meeting: JobAddress
    journal: Path
    num_servers: int

    def make(self, kind: str, name: str, address: str, log: Log) -> Role:
        """Create a coordinator, a scheduler or a server that listens at `address`."""
        own = (name, self.meeting.secret, address, log)
        if kind == "coordinator":
            return Coordinator(self.num_servers, self.job, self.journal, *own[1:])
        member = (self.meeting.coordinator, secrets.token_hex(8), *own)
        return (TaskScheduler if kind == "scheduler" else Server)(self.job, *member)


def names_of(num_servers: int) -> Sequence[str]:
    """Return the names of the roles of a job, the coordinator first."""
    return ["coordinator", "scheduler", *(f"server{number}" for number in range(num_servers))]


def address_of(folder: Path, name: str) -> str:
    """Return the address of a role on this host: a socket in the job's folder."""
    return f"ipc://{folder}/{name}"


def meeting_of(folder: Path, secret: Secret) -> JobAddress:
    """Return the address and secret with which workers on this host join the job."""
    return JobAddress(address_of(folder, "coordinator"), secret)


def make_here(roles: JobRoles, name: str, folder: Path, log: Path) -> Role:
    """Create a role on this host, with its socket in `folder`, that appends to a log file."""

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {name}: {line}\n")

    return roles.make(name.rstrip("0123456789"), name, address_of(folder, name), note)


def serve(roles: JobRoles, name: str, folder: Path, log: Path) -> None:
    """Run a role on this host until the job has ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    role = make_here(roles, name, folder, log)
    role.log(f"process {os.getpid()}, at {role.address}")
    PULSE.heed()  # the workers obey a stop signal and end the job, and so this role
    with PULSE.waiting(f"running as {name}"):
        role.run()
    if role.refusal:
        raise TrainingError(role.refusal)
