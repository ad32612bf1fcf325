"""What all processes of a job know, and the proofs and keys that are made of it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

import zmq
from zmq.utils import z85


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
