"""Hosts made of network namespaces, which a switch connects."""

import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

HOSTS = ("phxa", "phxb")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def remove_hosts() -> None:
    for name in (*HOSTS, "phxs"):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.fixture
def switch() -> Generator[str]:
    """Two hosts of the common kind, whose own name stands for 127.0.1.1; yields the switch's."""
    try:
        remove_hosts()
        ip("netns", "add", "phxs")
        ip("-n", "phxs", "link", "add", "br0", "type", "bridge")
        ip("-n", "phxs", "link", "set", "br0", "up")
        for number, name in enumerate(HOSTS, start=1):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip(*f"link add v0 netns {name} type veth peer name {name} netns phxs".split())
            ip("-n", name, "addr", "add", f"10.77.1.{number}/24", "dev", "v0")
            ip("-n", name, "link", "set", "v0", "up")
            ip("-n", "phxs", "link", "set", name, "master", "br0", "up")
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
    yield "phxs"
    remove_hosts()
