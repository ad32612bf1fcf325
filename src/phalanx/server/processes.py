"""The roles of a job as processes of this host."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.launch.heartbeat import PULSE
from phalanx.server.coordinator import Coordinator
from phalanx.server.requests import JobAddress
from phalanx.server.role import Role
from phalanx.server.secret import Secret
from phalanx.server.server import Server
from phalanx.server.task_scheduler import TaskScheduler


def names_of(num_servers: int) -> Sequence[str]:
    """Return the roles of a job, the coordinator first."""
    return ["coordinator", "scheduler", *(f"server{number}" for number in range(num_servers))]


def address_of(folder: Path, name: str) -> str:
    """Return where a role of this host listens: at a socket in a folder of the job's own."""
    return f"ipc://{folder}/{name}"


def meeting_of(folder: Path, secret: Secret) -> JobAddress:
    """Return where the workers of this host find the job."""
    return JobAddress(address_of(folder, "coordinator"), secret)


def make_role(
    name: str,
    job: str,
    meeting: JobAddress,
    address: str,
    journal: Path,
    num_servers: int,
    log: Path,
) -> Role:
    """Make a role, which writes a log."""

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {name}: {line}\n")

    own = (name, meeting.secret, address, note, meeting.faults)
    if name == "coordinator":
        return Coordinator(num_servers, job, journal, *own[1:])
    member = (meeting.coordinator, secrets.token_hex(8), *own)
    return TaskScheduler(job, *member) if name == "scheduler" else Server(job, *member)


def serve(
    name: str, job: str, meeting: JobAddress, folder: Path, num_servers: int, log: Path
) -> None:
    """Be a role of this host until the job has ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    address = address_of(folder, name)
    role = make_role(name, job, meeting, address, folder / "journal", num_servers, log)
    role.log(f"process {os.getpid()}, at {role.address}")
    PULSE.heed()  # it ends with the workers
    with PULSE.waiting(f"being the {name}"):
        role.run()
