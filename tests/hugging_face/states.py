"""Whole state dicts from and to the Hugging Face layout, by its table of names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phalanx.hugging_face.names import locate, table
from phalanx.models.shape import ModelShape


def from_hf(state: Mapping[str, Tensor], shape: ModelShape, family: str) -> dict[str, Tensor]:
    """Return the state dict of `Decoder(shape)`."""
    found = locate({name: tensor.shape for name, tensor in state.items()}, shape, family)
    return {
        name: part
        for link in table(shape, family)
        for name, part in zip(link.ours, link.split(state[found[link.theirs]]), strict=True)
    }


def to_hf(state: Mapping[str, Tensor], shape: ModelShape, family: str) -> dict[str, Tensor]:
    """Return the weights in their layout."""
    links = table(shape, family)
    return {link.theirs: link.join([state[name] for name in link.ours]) for link in links}
