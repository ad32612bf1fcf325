"""Whole state dicts from and to the Hugging Face layout, by its table of names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phalanx.checkpoint.weights import sizes_of
from phalanx.hugging_face.names import reader, table
from phalanx.models.shape import ModelShape


def from_hf(state: Mapping[str, Tensor], shape: ModelShape, family: str) -> dict[str, Tensor]:
    """Return the state dict of `Decoder(shape)`."""
    sizes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    read = reader(shape, family, sizes, state.__getitem__)
    return {name: read(name) for name in sizes_of(shape)}


def to_hf(state: Mapping[str, Tensor], shape: ModelShape, family: str) -> dict[str, Tensor]:
    """Return the weights in their layout in memory."""
    links = table(shape, family, is_stacked=True)
    return {link.theirs: link.join([state[name] for name in link.ours]) for link in links}
