"""Get and set the states of a rank's random generators, for checkpoints."""

from __future__ import annotations

import torch
from torch import nn

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
