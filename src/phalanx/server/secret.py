"""The secret of a job, and the keys derived from it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from phalanx.errors import ConfigError


@dataclass(frozen=True)
class Secret:
    """The secret that only the processes of a job have.

    Attributes:
        key: 32 random bytes.
    """

    key: bytes

    @classmethod
    def new(cls) -> Secret:
        """Create a random secret."""
        return cls(secrets.token_bytes(32))

    @property
    def job(self) -> str:
        """The name of the job, derived from the secret without revealing it."""
        return hmac.new(self.key, b"job", hashlib.sha256).hexdigest()[:16]

    def curve(self, who: str) -> tuple[bytes, bytes]:
        """Return the CURVE public and secret keys of one end of a connection, as z85 text."""
        # Both ends derive both key pairs from the secret, so no key is ever sent.
        key: bytes = z85.encode(hashlib.sha256(self.key + who.encode()).digest())
        return zmq.curve_public(key), key


MOST_BYTES: Final = 1000
"""Most bytes read from a secret's file, because a device such as /dev/zero has no end."""


def write_secret(path: Path) -> None:
    """Write a new random secret to a new file that only its owner can read.

    Raises:
        ConfigError: the file exists already, or cannot be created.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"secret is {path}, which cannot be created: {error.strerror}") from None
    with os.fdopen(file, "w") as text:
        text.write(Secret.new().key.hex() + "\n")


def read_secret(path: Path) -> Secret:
    """Read the secret in a file.

    Raises:
        ConfigError: the file cannot be read, or does not have 32 hexadecimal bytes.
    """
    try:
        with path.open("rb") as file:
            key = bytes.fromhex(file.read(MOST_BYTES).decode().strip())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a hexadecimal number"
        raise ConfigError(
            f"secret is {path}, which cannot be read: {why}; make one by: phalanx server secret "
            f"--secret {path}"
        ) from None
    if len(key) != 32:
        raise ConfigError(f"secret is {path}, which has {len(key)} bytes; expected 32")
    return Secret(key)
