"""What all processes of a job know, and the proofs and keys that are made of it."""

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
    """What all processes of a job know, and nobody else.

    Attributes:
        key: of 32 bytes.
    """

    key: bytes

    @classmethod
    def new(cls) -> Secret:
        """Make a new one."""
        return cls(secrets.token_bytes(32))

    @property
    def job(self) -> str:
        """The name of the job whose secret it is, which gives nothing of it away."""
        return self.proof("job")[:16]

    def proof(self, who: str, *numbers: str) -> str:
        """Return what shows that one knows the secret, by numbers of both ends."""
        text = "\0".join((who, *numbers)).encode()
        return hmac.new(self.key, text, hashlib.sha256).hexdigest()

    def curve(self, who: str) -> tuple[bytes, bytes]:
        """Return the public and the secret key of CURVE of one end."""
        made: bytes = z85.encode(hashlib.sha256(self.key + who.encode()).digest())
        return zmq.curve_public(made), made


MOST_BYTES: Final = 1000
"""Largest file of a secret that is read: a device has no end."""


def write_secret(path: Path) -> None:
    """Make a secret, in a new file that its owner alone can read.

    Raises:
        ConfigError: there is a file already, or none can be made.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"secret is {path}, which cannot be made: {error.strerror}") from None
    with os.fdopen(file, "w") as text:
        text.write(Secret.new().key.hex() + "\n")


def read_secret(path: Path) -> Secret:
    """Return the secret in a file.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            key = bytes.fromhex(file.read(MOST_BYTES).decode().strip())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no hexadecimal number"
        raise ConfigError(
            f"secret is {path}, which cannot be read: {why}; make one by: phalanx server secret "
            f"--secret {path}"
        ) from None
    if len(key) != 32:
        raise ConfigError(f"secret is {path}, of {len(key)} bytes; expected 32")
    return Secret(key)
