"""A model as a plan reads it: its parameters and blocks, each kind of block once.

A plan asks thousands of questions about models that exist nowhere yet. So nothing here holds or
changes a tensor, and of a decoder known by its shape one block stands for all: whoever asks a block
asks it once, and multiplies.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.blocks import blocks_of

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, without its numbers; each is equal to itself alone.

    Attributes:
        names: all that modules have for it, in the order of the model.
        block: name of the block that holds it by its first name; empty outside of blocks.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    is_trained: bool
    is_contiguous: bool
    block: str = ""

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True)
class Skeleton:
    """What a rank has of a model, before it is split.

    Attributes:
        model: the whole model, to be asked about its modules and never changed; of a decoder known
            by its shape, one with as many blocks as there are kinds.
        weights: the parameters of the rank, of alike blocks the parameters of one.
        blocks: name of each block in `model` -> names of the rank's blocks that it stands for.
        num_blocks: of the whole model.
        shape: of a decoder.
        gone: names of modules that only other ranks have.
    """

    model: nn.Module
    weights: tuple[Weight, ...]
    blocks: Mapping[str, tuple[str, ...]]
    num_blocks: int
    shape: ModelShape | None = None
    gone: frozenset[str] = field(default_factory=frozenset[str])

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the first parameter."""
        return self.weights[0].dtype

    def named(self, name: str) -> tuple[str, ...]:
        """Return the names on this rank of what `model` has by `name`: a module or a parameter.

        There are several where a block stands for others, and none where other ranks have it.
        """
        block = _within(name, self.blocks)
        if block:
            return tuple(f"{each}{name[len(block) :]}" for each in self.blocks[block])
        return () if _within(name, self.gone) else (name,)

    def parameters(self) -> Iterator[Weight]:
        """Yield the parameters of the rank in the order of the model, as often as it has each."""
        for block, weights in groupby(self.weights, lambda weight: weight.block):
            of_block = [*weights]
            for _ in self.blocks.get(block, ("",)):
                yield from of_block

    def part(self, here: Collection[str], gone: Collection[str]) -> Skeleton:
        """Return what one stage has, given the names of its modules and of the others.

        A parameter with a name in each is of both, and goes by its first name in both.
        """
        is_gone = functools.partial(_within, names=frozenset(gone).difference(here))
        is_here = functools.partial(_within, names=frozenset(here))
        blocks = {
            block: tuple(name for name in names if not is_gone(name))
            for block, names in self.blocks.items()
        }
        blocks = {block: names for block, names in blocks.items() if names}
        weights: list[Weight] = []
        for weight in self.weights:
            if weight.block in self.blocks and len(self.blocks[weight.block]) > 1:
                weights += [weight] if weight.block in blocks else []
            elif any(map(is_here, weight.names)) or not any(map(is_gone, weight.names)):
                first, *others = weight.names
                names = (first, *(name for name in others if not is_gone(name)))
                weights.append(
                    weight if names == weight.names else dataclasses.replace(weight, names=names)
                )
        return dataclasses.replace(
            self,
            weights=tuple(weights),
            blocks=blocks,
            gone=frozenset(gone).difference(here),
        )


def skeleton_of(model: nn.Module) -> Skeleton:
    """Return the skeleton of a model that is not split yet, on any device; it is left as it is."""
    blocks = [name for name, _ in blocks_of(model)]
    return Skeleton(
        model=model,
        weights=_weights(model, blocks),
        blocks={name: (name,) for name in blocks},
        num_blocks=len(blocks),
        shape=model.shape if isinstance(model, Decoder) else None,
    )


def skeleton_of_shape(shape: ModelShape, master: torch.dtype) -> Skeleton:
    """Return the skeleton of a decoder whose parameters are of type `master`.

    Blocks differ in their windows alone, which no parameter and no message depends on.
    """
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(shape, num_layers=1)).to(dtype=master)
    skeleton = skeleton_of(model)
    (first,) = skeleton.blocks
    alike = tuple(f"blocks.{index}" for index in range(shape.num_layers))
    return dataclasses.replace(
        skeleton, blocks={first: alike}, num_blocks=shape.num_layers, shape=shape
    )


def _weights(model: nn.Module, blocks: Iterable[str]) -> tuple[Weight, ...]:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    known = frozenset(blocks)
    return tuple(
        Weight(
            names=tuple(own),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            is_trained=parameter.requires_grad,
            is_contiguous=parameter.is_contiguous(),
            block=_within(own[0], known),
        )
        for parameter, own in names.items()
    )


_Copied = TypeVar("_Copied", bound=tuple[object, ...])


def copied_on_meta(values: _Copied) -> _Copied:
    """Return copies, on the meta device, of models and of objects that have models."""
    parts = [part for value in values for part in (value, *vars(value).values())]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    # As if they had been copied already, so that none is.
    return copy.deepcopy(values, {id(tensor): _on_meta(tensor) for tensor in tensors})


def _on_meta(tensor: Tensor) -> Tensor:
    meta = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


def _within(name: str, names: Collection[str]) -> str:
    """Return the one of `names` that is `name` or a module around it; empty if none is."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name
