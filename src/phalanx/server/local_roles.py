"""The roles of a job as threads of this process, for `phalanx verify` and `show`, and for tests."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.server.processes import JobRoles, make_here, meeting_of, names_of
from phalanx.server.requests import JobAddress
from phalanx.server.role import Role
from phalanx.server.secret import Secret


@dataclass
class LocalRoles:
    """A coordinator, a scheduler and servers that run in this process.

    Attributes:
        folder: folder of the sockets, the journal and the log.
        meeting: address and secret with which workers join.
        num_servers: number of servers.
        roles: name -> role.
    """

    folder: Path
    meeting: JobAddress
    num_servers: int
    roles: dict[str, Role] = field(default_factory=dict[str, Role])
    _stops: dict[str, tuple[threading.Event, threading.Thread]] = field(
        default_factory=dict[str, tuple[threading.Event, threading.Thread]]
    )

    @property
    def log(self) -> Path:
        """The log file to which all roles write."""
        return self.folder / "log"

    def start(self, name: str) -> None:
        """Start a role, named as in `processes.names_of`."""
        roles = JobRoles("job", self.meeting, self.folder / "journal", self.num_servers)
        self.roles[name] = role = make_here(roles, name, self.folder, self.log)
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
def local_roles(num_servers: int = 2) -> Generator[LocalRoles]:
    """Run the roles of a job inside the block."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-ps-"))
    made = LocalRoles(folder, meeting_of(folder, Secret.new()), num_servers)
    try:
        for name in names_of(num_servers):
            made.start(name)
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)
