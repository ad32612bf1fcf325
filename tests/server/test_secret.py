"""The file of the secret of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.server.secret import read_secret, write_secret


def test_a_secret_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret")
    assert len(read_secret(tmp_path / "secret").key) == 32


def test_a_device_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(ConfigError, match=r"secret is /dev/zero, .* is not a hexadecimal number"):
        read_secret(Path("/dev/zero"))
