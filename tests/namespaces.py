"""Hosts made of network namespaces, which a switch connects, and an ssh between them.

The ssh needs no server that an operating system installs: `ssh_server.py` in each host runs the
commands that `ssh_client.py` sends over TCP, so that a cut link or a killed client behaves as with
OpenSSH. A command runs in the host's namespace, under the host's own name, in a session of its own.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

OWN = os.getpid()
HOSTS = (f"phxa{OWN}", f"phxb{OWN}")
THREE_HOSTS = (*HOSTS, f"phxc{OWN}")
SWITCH = f"phxs{OWN}"
"""Several processes may test on one machine, and all see its namespaces."""

SSH = f"{sys.executable} {Path(__file__).parent / 'ssh_client.py'}"
"""What stands in for the command ssh: SSH HOST COMMAND; run it in the namespace of a host."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def on_host(host: str, *words: str) -> list[str]:
    """Return the command that runs `words` on a host, under the host's own name."""
    named = f'hostname {host} && exec "$@"'
    return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", named, "sh", *words]


def address_of(host: str) -> str:
    """Return the IPv4 address of a host on the switch."""
    return f"10.77.1.{ord(host[3]) - ord('a') + 1}"


def remove_hosts() -> None:
    """Remove the hosts of this process, and of those that were killed before they did."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20)
    for name, owner in re.findall(r"^(phx[a-z](\d+))\b", listed.stdout, re.MULTILINE):
        if owner == str(OWN) or not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@contextmanager
def switched(hosts: Sequence[str]) -> Iterator[str]:
    """Hosts of the common kind, whose own name stands for 127.0.1.1; yields the switch's name."""
    try:
        # `ip netns add` of two processes at once fails: both mount the folder of the names.
        with (Path(tempfile.gettempdir()) / "phalanx-namespaces.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_hosts()
            ip("netns", "add", SWITCH)
            ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
            ip("-n", SWITCH, "link", "set", "br0", "up")
            for name in hosts:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip(*f"link add v0 netns {name} type veth peer name {name} netns {SWITCH}".split())
                ip("-n", name, "addr", "add", f"{address_of(name)}/24", "dev", "v0")
                ip("-n", name, "link", "set", "v0", "up")
                ip("-n", SWITCH, "link", "set", name, "master", "br0", "up")
                others = "".join(
                    f"{address_of(other)} {other}\n" for other in hosts if other != name
                )
                folder = Path("/etc/netns") / name
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
            subprocess.run(["unshare", "--uts", "true"], check=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        remove_hosts()
        pytest.skip(f"needs the right to make network namespaces: {error}")
    yield SWITCH
    remove_hosts()


@pytest.fixture
def switch() -> Generator[str]:
    """Two hosts; yields the name of their switch."""
    with switched(HOSTS) as name:
        yield name


@contextmanager
def ssh_servers(hosts: Sequence[str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run a server of SSH on each host; yields them by host. Killing one kills no command of it."""
    file = str(Path(__file__).parent / "ssh_server.py")
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for host in hosts:
            command = on_host(host, sys.executable, file, host)
            servers[host] = subprocess.Popen(command, stdout=subprocess.PIPE)
        for server in servers.values():
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
        yield servers
    finally:
        for host, server in servers.items():
            server.kill()
            server.wait(20)
            assert server.stdout is not None
            server.stdout.close()
            kill_all_on(host)


def pids_on(host: str) -> list[int]:
    """Return the processes that run in the network namespace of a host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host], capture_output=True, text=True, timeout=20
    )
    return [int(word) for word in listed.stdout.split()]


def kill_all_on(host: str) -> None:
    """Kill every process of a host at once, as a power failure does."""
    until_s = time.monotonic() + 20
    while (pids := pids_on(host)) and time.monotonic() < until_s:
        for pid in pids:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def cut(host: str, *, is_cut: bool = True) -> None:
    """Cut the link of a host to the switch, or mend it."""
    ip("-n", SWITCH, "link", "set", host, "down" if is_cut else "up")
