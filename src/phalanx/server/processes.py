"""The roles of a job as processes, or as threads of this process."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
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
        num_groups: number of worker groups, each of which has a scheduler.
    """

    job: str
    meeting: JobAddress
    journal: Path
    num_servers: int
    num_groups: int = 1

    def make(self, kind: str, name: str, address: str, log: Log, group: int = 0) -> Role:
        """Create a coordinator, a group's scheduler or a server that listens at `address`."""
        listener = self.meeting.secret, address, log
        if kind == "coordinator":
            own = self.num_servers, self.job, self.journal
            return Coordinator(*own, *listener, self.num_groups)
        own = self.job, self.meeting.coordinator, secrets.token_hex(8), name
        if kind == "scheduler":
            return TaskScheduler(*own, *listener, group)
        return Server(*own, *listener)

    def make_here(self, name: str, folder: Path, log: Path) -> Role:
        """Create a role on this host, with its socket in `folder`, that appends to a log file."""
        kind = name.rstrip("0123456789")
        group = int(name.removeprefix("scheduler")) if kind == "scheduler" else 0
        return self.make(kind, name, f"ipc://{folder}/{name}", log_of(name, log), group)


def log_of(name: str, path: Path) -> Log:
    """Return a function that appends lines of a process of the job to a log file."""

    def note(line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {name}: {line}\n")

    return note


def names_of(num_servers: int, num_groups: int = 1) -> Sequence[str]:
    """Return the names of the roles of a job, the coordinator first."""
    schedulers = [f"scheduler{group}" for group in range(num_groups)]
    return ["coordinator", *schedulers, *(f"server{number}" for number in range(num_servers))]


def meeting_of(folder: Path, secret: Secret) -> JobAddress:
    """Return the address and secret with which workers on this host join the job."""
    return JobAddress(f"ipc://{folder}/coordinator", secret)


def serve(roles: JobRoles, name: str, folder: Path, log: Path) -> None:
    """Run a role on this host until the job has ended."""
    role = roles.make_here(name, folder, log)
    role.log(f"process {os.getpid()}, at {role.address}")
    PULSE.heed()  # the workers obey a stop signal and end the job, and so this role
    with PULSE.waiting(f"running as {name}"):
        role.run()
    if role.refusal:
        raise TrainingError(role.refusal)


class LocalRoles:
    """A coordinator, a scheduler and servers that run as threads of this process.

    Attributes:
        folder: folder of the sockets, the journal and the log.
        meeting: address and secret with which workers join.
        num_servers: number of servers.
        num_groups: number of worker groups.
        log: file to which all roles write.
        roles: name -> role.
    """

    def __init__(self, folder: Path, num_servers: int, num_groups: int = 1) -> None:
        """Start no role yet."""
        self.folder, self.meeting = folder, meeting_of(folder, Secret.new())
        self.num_servers, self.num_groups, self.log = num_servers, num_groups, folder / "log"
        self.roles: dict[str, Role] = {}
        self._stops: dict[str, tuple[threading.Event, threading.Thread]] = {}

    def start(self, name: str) -> None:
        """Start a role, named as in `names_of`."""
        numbers = self.num_servers, self.num_groups
        job = JobRoles("job", self.meeting, self.folder / "journal", *numbers)
        self.roles[name] = role = job.make_here(name, self.folder, self.log)
        stop = threading.Event()
        thread = threading.Thread(target=role.run, args=(stop,), name=name, daemon=True)
        thread.start()
        self._stops[name] = stop, thread

    def stop(self, name: str) -> None:
        """Stop a role without notifying the others."""
        stop, thread = self._stops.pop(name)
        stop.set()
        thread.join()

    def close(self) -> None:
        """Stop all roles."""
        for name in list(self._stops):
            self.stop(name)


@contextmanager
def local_roles(num_servers: int = 2, num_groups: int = 1) -> Generator[LocalRoles]:
    """Run the roles of a job inside the block, for `phalanx verify` and `show`, and for tests."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-ps-"))
    local = LocalRoles(folder, num_servers, num_groups)
    try:
        for name in names_of(num_servers, num_groups):
            local.start(name)
        yield local
    finally:
        local.close()
        shutil.rmtree(folder)
