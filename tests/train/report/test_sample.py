"""What a model writes is whole characters."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from phalanx.train.report.sample import opening


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_an_opening_within_a_character_begins_with_the_next() -> None:
    ids = np.frombuffer("öffentliche Briefe und\nmehr".encode()[:-1], np.uint8)  # ids[0] is cut off
    file = types.SimpleNamespace(num_tokens=len(ids), map=lambda: ids)
    file.leaves = [file]
    tokens: Any = types.SimpleNamespace(validation=file, train=None)
    tokenizer: Any = Bytes()
    assert opening(tokens, tokenizer) == "ffentliche Briefe und"
