"""Checks of addresses that others connect to."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from phalanx.errors import ConfigError

MOST_PORT: Final = 65_535
"""Largest port number."""


def check_address(option: str, address: str) -> None:
    """Check that others can connect to an address, which is sent to them unchanged.

    Raises:
        ConfigError: it is no TCP address, the only kind that is encrypted; its host is 0.0.0.0,
            [::] or *; or the port is too large.
    """
    if not address.startswith("tcp://"):
        raise ConfigError(f"{option} is {address}; expected tcp://HOST:PORT")
    port = address.rpartition(":")[2]
    if port.isdecimal() and (len(port) > 5 or int(port) > MOST_PORT):
        raise ConfigError(
            f"{option} is {address}, but the largest port is {MOST_PORT}; * selects any free port"
        )
    number = _number_of(address)
    if address.startswith("tcp://*") or (number is not None and number.is_unspecified):
        raise ConfigError(
            f"{option} is {address}, which is any address of this host; expected the address that "
            f"others connect to, such as tcp://10.0.0.1:{port}, or tcp://127.0.0.1:{port} on one "
            "host"
        )


def _number_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of a TCP address; None if its host cannot be resolved."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    try:
        if host.startswith("["):
            return ipaddress.ip_address(host.strip("[]"))
        return ipaddress.ip_address(socket.gethostbyname(host)) if host else None
    except (OSError, ValueError):  # neither an IP address nor a name that this host resolves
        return None
