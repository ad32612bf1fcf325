"""Lose, double and reorder the messages of a job of parameter servers, at random."""

from __future__ import annotations

import random
from typing import Any

import pytest
import zmq

from phalanx.server import wire


def lose_messages(
    monkeypatch: pytest.MonkeyPatch,
    *,
    drop: float = 0.0,
    double: float = 0.0,
    reorder: float = 0.0,
    seed: int = 0,
) -> None:
    """Have each socket drop, double and reorder what it sends with these probabilities."""
    send, seeds = wire.send_frames, random.Random(seed)
    randoms: dict[Any, random.Random] = {}
    held: dict[Any, list[Any]] = {}

    def send_some(socket: zmq.Socket[bytes], frames: list[Any]) -> bool:
        if socket not in randoms:
            randoms[socket] = random.Random(seeds.randrange(1 << 32))
        chance = randoms[socket].random()
        if chance < drop:
            return True
        before = held.pop(socket, None)
        if chance < drop + reorder and before is None:
            held[socket] = frames
            return True
        copies = 2 if randoms[socket].random() < double else 1
        late = [] if before is None else [before]
        return all([send(socket, each) for each in [frames] * copies + late])

    monkeypatch.setattr(wire, "send_frames", send_some)
