"""Choose the network interface by which gloo's ranks reach each other on several hosts.

By default gloo uses the address to which the host's own name resolves. On Debian and derived
systems this is 127.0.1.1 (from /etc/hosts), which no other host can reach. The route to the job's
store is known to work, so its interface is chosen.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.launch.rank_env import RankEnv

if TYPE_CHECKING:
    from torch.distributed import Store

VARIABLE = "GLOO_SOCKET_IFNAME"

LOOPBACK = ("127.", "::1")
"""Begins of addresses at which a host reaches only itself."""

_SIOCGIFADDR = 0x8915


def is_here(host: str) -> bool:
    """Return whether a name or address is of this host: only its own addresses can be bound."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def choose(store: Store, env: RankEnv) -> str:
    """Set GLOO_SOCKET_IFNAME unless it is set; every rank of the job calls this together.

    Returns:
        The address at which other hosts reach this host; empty if unknown.
    """
    if sys.platform != "linux":
        return ""
    address = address_towards(os.environ.get("MASTER_ADDR", ""))
    if env.num_here == env.num_ranks:
        address = "127.0.0.1"
    elif address and not address.startswith(LOOPBACK):
        store.set("address", address)
    if store.add("addresses", 1) == env.num_ranks:
        store.set("addresses are known", "")
    store.wait(["addresses are known"])
    if address.startswith(LOOPBACK) and store.check(["address"]):  # this is the host of the store
        address = address_towards(store.get("address").decode())
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault(VARIABLE, name)
    return address_of(os.environ.get(VARIABLE, "")) or address


def address_towards(host: str) -> str:
    """Return this host's source address for packets to `host`, or "" without a route."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return probe.getsockname()[0]
    return ""


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, or None if none has."""
    if ":" in address:
        digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with suppress(OSError):
            lines = Path("/proc/net/if_inet6").read_text().splitlines()
            return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; "" if it has none, or off Linux."""
    if sys.platform != "linux" or not interface:
        return ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("256s", interface.encode())
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[20:24])
    return ""
