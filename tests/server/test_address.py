"""Addresses that are encrypted, and that are none."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigError
from phalanx.server.address import check_address, is_local


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("ipc:///tmp/socket", True),
        ("tcp://127.0.0.1:7000", True),
        ("tcp://127.3.2.1:*", True),
        ("tcp://[::1]:7000", True),
        ("tcp://localhost:7000", True),
        ("tcp://10.0.0.1:7000", False),
        ("tcp://[fe80::1]:7000", False),
        ("tcp://no-such-host.invalid:7000", False),
        ("tcp://127.0.0.1.evil.invalid:7000", False),
        ("tcp://", False),
    ],
)
def test_what_a_host_reaches_alone_is_not_encrypted(address: str, expected: bool) -> None:
    assert is_local(address) == expected
    check_address("address", address)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_an_address_of_any_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"such as tcp://10\.0\.0\.1:70, or tcp://127"):
        check_address("address", f"tcp://{host}:70")


@pytest.mark.parametrize("port", ["65536", "99999", "9" * 5000])
def test_a_port_that_no_host_has_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=r"the largest port is 65535; . selects any free port"):
        check_address("address", f"tcp://127.0.0.1:{port}")
