"""Addresses of roles, and what is none."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigError
from phalanx.server.address import check_address


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7000", "tcp://[fe80::1]:7000", "tcp://a:*"])
def test_an_address_of_a_host_is_accepted(address: str) -> None:
    check_address("address", address)


def test_an_address_that_is_not_encrypted_is_refused() -> None:
    with pytest.raises(ConfigError, match="address is ipc:///tmp/a; expected tcp://HOST:PORT"):
        check_address("address", "ipc:///tmp/a")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_an_address_of_any_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"such as tcp://10\.0\.0\.1:70, or tcp://127"):
        check_address("address", f"tcp://{host}:70")


@pytest.mark.parametrize("port", ["65536", "99999", "9" * 5000])
def test_a_port_that_no_host_has_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=r"the largest port is 65535; . selects any free port"):
        check_address("address", f"tcp://127.0.0.1:{port}")
