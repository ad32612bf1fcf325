"""`phalanx server ROLE`: run a coordinator, scheduler or server of a job on several hosts."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

from phalanx.config.command_line import read_words
from phalanx.config.fields import Positional, Range, check_values
from phalanx.errors import ConfigError
from phalanx.report.terminal import Terminal

ROLES: Final = ("secret", "coordinator", "scheduler", "server")


@dataclass(frozen=True, kw_only=True)
class ServerRoleConfig:
    """Be a role of a job over parameter servers until the job has ended.

    `secret` makes the file of the secret, which each process of the job needs a copy of. Workers
    are started by `phalanx train --server.coordinator ADDRESS --server.worker NUMBER`.
    """

    role: Annotated[str | None, Positional("ROLE")] = None
    """secret, coordinator, scheduler or server."""
    secret: str | None = None
    """File of the job's secret."""
    address: str | None = None
    """Where to listen, as others reach it, such as tcp://10.0.0.1:7000, or tcp://10.0.0.1:* for any
    free port."""
    coordinator: str | None = None
    """Address of the coordinator; of a scheduler and a server."""
    name: str | None = None
    """Name of a server in the job; its host and a random number if unset."""
    group: Annotated[int, Range(0, 64)] = 0
    """Number of the worker group of a scheduler; workers on its host are of this group."""
    num_servers: Annotated[int, Range(1, 64, "[]")] = 2
    """Number of servers that hold the weights; the coordinator waits for all of them."""
    num_groups: Annotated[int, Range(1, 64, "[]")] = 1
    """Number of worker groups, of one scheduler each; the coordinator waits for all of them."""
    journal: str = "phalanx-journal"
    """File of the coordinator's state; one that is started again reads it."""


def run(argv: list[str]) -> int:
    """Run one role until the job ends or a signal arrives; for `secret`, write the file.

    Raises:
        ConfigError: an option is missing or does not fit, or the coordinator refuses the role.
    """
    config = ServerRoleConfig(**read_words(argv, ServerRoleConfig, prog="phalanx server"))
    check_values(config)
    if config.role not in ROLES:
        raise ConfigError(
            f"ROLE is {config.role or 'missing'}; expected: phalanx server {'|'.join(ROLES)}"
        )
    if find_spec("zmq") is None:
        raise ConfigError(
            "server needs zmq, which is not installed: pip install 'phalanx-train[server]'"
        )
    secret = _given(config, "secret")
    if config.role == "secret":
        from phalanx.server.secret import write_secret

        write_secret(Path(secret))
        Terminal().say(f"wrote {secret}; copy it to each process of the job, and keep it private")
        return 0
    _serve(config, secret, _given(config, "address"))
    return 0


def _given(config: ServerRoleConfig, name: str) -> str:
    value: str | None = getattr(config, name)
    if value is None:
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} is missing; phalanx server {config.role} needs it")
    return value


def _serve(config: ServerRoleConfig, secret: str, address: str) -> None:
    import zmq

    from phalanx.launch.process_memory import collect_as_usual, keep_freed_memory
    from phalanx.server.processes import JobRoles
    from phalanx.server.requests import JobAddress
    from phalanx.server.secret import read_secret
    from phalanx.server.wire import check_address, limit_descriptors

    terminal = Terminal()

    def note(line: str) -> None:
        terminal.say(f"{time.strftime('%H:%M:%S')} {name}: {line}")

    is_first = config.role == "coordinator"
    name = config.name or config.role or ""
    if config.role == "scheduler" and config.name is None:
        name = f"scheduler{config.group}"
    if config.role == "server" and config.name is None:
        name = f"{os.uname().nodename}-{secrets.token_hex(4)}"
    coordinator = address if is_first else _given(config, "coordinator")
    check_address("address", address)
    check_address("coordinator", coordinator)
    meeting = JobAddress(coordinator, read_secret(Path(secret)))
    numbers = config.num_servers, config.num_groups
    roles = JobRoles(meeting.secret.job, meeting, Path(config.journal), *numbers)
    try:
        role = roles.make(config.role or "", name, address, note, config.group)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"address is {address}, where this host cannot listen: {error}; expected an address "
            "of this host, such as tcp://127.0.0.1:7000"
        ) from None
    stop = threading.Event()

    def end(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)
    note(f"process {os.getpid()}, at {role.address}")
    keep_freed_memory()
    limit_descriptors()
    collect_as_usual()
    role.run(stop)
    if role.refusal:
        raise ConfigError(role.refusal)
    note("ended by a signal" if stop.is_set() else "the job has ended")
