"""Addresses of roles: which are reached from their own host alone, and which from nowhere."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from phalanx.errors import ConfigError

MOST_PORT: Final = 65_535
"""The last port of a host."""


def is_local(address: str) -> bool:
    """Return whether an address is reached from its own host alone.

    A name, such as localhost, counts as the number that this host knows it by.
    """
    if not address.startswith("tcp://"):
        return address.startswith(("ipc://", "inproc://"))
    number = _number_of(address)
    return number is not None and number.is_loopback


def check_address(option: str, address: str) -> None:
    """Refuse an address that stands for any host: others would get it as it is, and not reach it.

    Raises:
        ConfigError: the host is 0.0.0.0, [::] or *; or there is no such port.
    """
    port = address.rpartition(":")[2]
    if port.isdecimal() and (len(port) > 5 or int(port) > MOST_PORT):
        raise ConfigError(
            f"{option} is {address}, but ports end at {MOST_PORT}; * takes any free one"
        )
    number = _number_of(address)
    if address.startswith("tcp://*") or (number is not None and number.is_unspecified):
        raise ConfigError(
            f"{option} is {address}, which is any address of this host; expected the one that "
            f"others reach, such as tcp://10.0.0.1:{port}, or tcp://127.0.0.1:{port} on one host"
        )


def _number_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the number of the host of a TCP address; None if it has none."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    try:
        if host.startswith("["):
            return ipaddress.ip_address(host.strip("[]"))
        return ipaddress.ip_address(socket.gethostbyname(host)) if host else None
    except (OSError, ValueError):  # no number, and no name that this host knows
        return None
