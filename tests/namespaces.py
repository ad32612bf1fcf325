"""Hosts made of network namespaces, which a switch connects."""

import os
import re
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

OWN = os.getpid()
HOSTS = (f"phxa{OWN}", f"phxb{OWN}")
SWITCH = f"phxs{OWN}"
"""Several processes may test on one machine, and all see its namespaces."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def remove_hosts() -> None:
    """Remove the hosts of this process, and of those that were killed before they did."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20)
    for name, owner in re.findall(r"^(phx[abs](\d+))\b", listed.stdout, re.MULTILINE):
        if owner == str(OWN) or not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.fixture
def switch() -> Generator[str]:
    """Two hosts of the common kind, whose own name stands for 127.0.1.1; yields the switch's."""
    try:
        remove_hosts()
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "br0", "up")
        for number, name in enumerate(HOSTS, start=1):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip(*f"link add v0 netns {name} type veth peer name {name} netns {SWITCH}".split())
            ip("-n", name, "addr", "add", f"10.77.1.{number}/24", "dev", "v0")
            ip("-n", name, "link", "set", "v0", "up")
            ip("-n", SWITCH, "link", "set", name, "master", "br0", "up")
            others = "".join(
                f"10.77.1.{n} {other}\n" for n, other in enumerate(HOSTS, 1) if other != name
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
