"""What all processes of a job know, and the proofs and keys that are made of it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass

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

    def proof(self, who: str, *numbers: str) -> str:
        """Return what shows that one knows the secret, by numbers of both ends."""
        text = "\0".join((who, *numbers)).encode()
        return hmac.new(self.key, text, hashlib.sha256).hexdigest()

    def curve(self, who: str) -> tuple[bytes, bytes]:
        """Return the public and the secret key of CURVE of one end."""
        made: bytes = z85.encode(hashlib.sha256(self.key + who.encode()).digest())
        return zmq.curve_public(made), made

    def text(self) -> str:
        """Return it as a line of a file."""
        return base64.b64encode(self.key).decode()

    @classmethod
    def of_text(cls, text: str) -> Secret:
        """Read the line.

        Raises:
            ConfigError: it is none.
        """
        try:
            key = base64.b64decode(text.strip(), validate=True)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise ConfigError(
                "the file of the secret holds no 32 bytes in base64; "
                "`phalanx server secret FILE` writes one"
            )
        return cls(key)
