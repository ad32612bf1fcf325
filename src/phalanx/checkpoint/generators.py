"""Get and set the states of random generators, for checkpoints."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.checkpoint.untrusted import brief
from phalanx.errors import CheckpointError


def generators_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the states of torch's CPU generator and, for a model on a GPU, the GPU's generator."""
    states = {"cpu": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: dict[str, torch.Tensor]) -> None:
    """Restore the states of this rank's generators.

    Raises:
        CheckpointError: a state is not a valid generator state.
    """
    try:
        for device, state in states.items():
            (torch.cuda if device == "cuda" else torch).set_rng_state(state)
    except RuntimeError as error:
        raise CheckpointError(f"its generator state is not valid: {error}") from error


def to_text(generator: torch.Tensor | None) -> str:
    """Return a generator state as hexadecimal text; empty for None."""
    return "" if generator is None else generator.numpy().tobytes().hex()


def from_text(text: str) -> torch.Tensor | None:
    """Return the generator state that `to_text` encoded; None for empty text."""
    if not text:
        return None
    try:
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"a generator state of the checkpoint, {brief(text)}, is not valid: {brief(error)}"
        ) from error
    return state
