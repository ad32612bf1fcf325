"""The hosts of `phalanx launch` and the ranks that each shall have, as text or as a host file."""

from __future__ import annotations

import re
import shlex
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from phalanx.errors import ConfigError, printable
from phalanx.strategy import Strategy

FORM: Final = "a:2,b:2 or user@a:2, which is a host's name and the number of its ranks"

_HOST: Final = re.compile(
    r"(?:([A-Za-z0-9_.-]+)@)?([A-Za-z0-9_](?:[A-Za-z0-9_.-]*))(?::(\d{1,5}))?"
)


@dataclass(frozen=True)
class Host:
    """A host of a job.

    Attributes:
        name: name or IPv4 address by which ssh reaches it.
        num_ranks: ranks to start there; 0: not given, so that the host's devices decide.
        user: user of ssh; empty: ssh's own choice.
    """

    name: str
    num_ranks: int = 0
    user: str = ""

    @property
    def target(self) -> str:
        """The host as ssh names it."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def is_local(self) -> bool:
        """Whether this is the machine of this process, which needs no ssh."""
        own = socket.gethostname()
        names = ("localhost", "127.0.0.1", own, own.partition(".")[0])
        is_own = self.name in names or (
            self.name.startswith(f"{own}.") and self.name == socket.getfqdn()
        )
        return not self.user and is_own

    def __str__(self) -> str:
        return f"{self.target}:{self.num_ranks}" if self.num_ranks else self.target


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A job to start on several hosts.

    Attributes:
        hosts: the hosts, in the order of their ranks.
        command: words after `phalanx`, such as ("train", "--strategy", "dp4").
        folder: working folder, which each host must have.
        restarts: most generations that begin after a loss.
        min_ranks: fewest ranks on which the job continues; None: more than half of them.
        ssh: the command ssh, with options of the user's own.
        variables: environment variables that the ranks get, by name.
        port: port of the job's store on the first host; 0: a free one.
    """

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    folder: str
    restarts: int = 0
    min_ranks: int | None = None
    ssh: tuple[str, ...] = ("ssh",)
    variables: tuple[tuple[str, str], ...] = ()
    port: int = 0

    @property
    def num_ranks(self) -> int:
        """The ranks of all hosts, of which each gives its number."""
        return sum(host.num_ranks for host in self.hosts)

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that the command names, or None."""
        named = re.search(r"--strategy[= ](\S+)", " ".join(self.command))
        return None if named is None or named[1] == "auto" else Strategy.parse(named[1])

    @property
    def command_text(self) -> str:
        """The command as a shell reads it."""
        return shlex.join(["phalanx", *self.command])


def parse_host(text: str) -> Host:
    """Return the host of "a", "a:2" or "user@a:2"; raise ConfigError for any other text."""
    match = _HOST.fullmatch(text)
    if match is None or (match[3] is not None and int(match[3]) == 0):
        raise ConfigError(f"host '{printable(text)}' is not legal; expected {FORM}")
    return Host(match[2], int(match[3] or 0), match[1] or "")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of "a:2,b:2"; raise ConfigError for another form, or a host named twice."""
    return _distinct([parse_host(word.strip()) for word in text.split(",")])


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file: a line each, `a slots=2` as of DeepSpeed and MPI, or `a:2`.

    Empty lines, and `#` to the end of a line, are comments; other words, as `max_slots=4`, are not
    read.

    Raises:
        ConfigError: there is no such file, a line has another form, or the file names no host, or
            one twice.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"hostfile {path}: {reason}; expected lines like: a slots=2") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        try:
            hosts.append(parse_host(":".join([words[0], *slots])))
        except ConfigError:
            raise ConfigError(
                f"{path}:{number}: '{printable(line.strip())}' is no host; expected a line like: "
                "a slots=2, or a:2"
            ) from None
    if not hosts:
        raise ConfigError(f"hostfile {path} names no host; expected lines like: a slots=2")
    return _distinct(hosts)


def _distinct(hosts: Sequence[Host]) -> tuple[Host, ...]:
    [(name, times)] = Counter(host.name for host in hosts).most_common(1)
    if times > 1:
        total = sum(host.num_ranks for host in hosts if host.name == name)
        raise ConfigError(
            f"host {name} is named {times} times; name it once, with all its ranks"
            + (f": {name}:{total}" if total else "")
        )
    return tuple(hosts)
