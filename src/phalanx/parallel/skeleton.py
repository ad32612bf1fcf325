"""A model description for plans: names, shapes and dtypes of parameters, and the blocks.

A planner makes thousands of plans for models that do not exist in memory. So a skeleton neither
stores nor changes tensor data. The skeleton of a decoder shape has one block that represents all
blocks, so that costs are computed for one block and multiplied. Blocks are the units of
recomputation and of sharding.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from torch import nn

from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.experts import Experts
from phalanx.models.shape import ModelShape

Shape = tuple[int, ...]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of each element of the outermost ModuleLists, in order of registration.

    A list inside a block, such as the experts of a layer, is part of that block. Elements that are
    ModuleLists or ModuleDicts are not blocks, because they have no forward; they are searched.

    Returns:
        Names as in `model.named_modules()`, each module once; empty without any ModuleList.
    """
    names: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if isinstance(module, nn.ModuleList) and not is_container:
                names.setdefault(child, path)
            else:
                visit(child, path)

    visit(model, "")
    return [(name, block) for block, name in names.items()]


def ends_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of the modules in a model's `ends`: before its blocks, and after them.

    fsdp gathers each of the two when it runs, instead of with the rest of the model. The backward
    of the modules before the blocks must not read their parameters, as in an embedding look-up.

    Raises:
        StrategyError: a listed module is not a submodule of the model.
    """
    names = {module: name for name, module in model.named_modules()}
    ends: Iterable[Iterable[nn.Module]] = getattr(model, "ends", ((), ()))
    for module in (module for modules in ends for module in modules):
        if module not in names:
            raise StrategyError(
                f"fsdp: the `ends` of {type(model).__name__} list a {type(module).__name__} that "
                "is not a submodule of the model; expected submodules"
            )
    return tuple(tuple(names[module] for module in modules) for modules in ends)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module of each module of stacked experts.

    Dimension 0 of each of its own parameters counts experts, and its forward is the one that `ep`
    replaces. It is the `Experts` of a decoder, or has the interface of experts in transformers:

        num_experts                                      E
        parameters                                       [E, ..], at least one of them [E, .., ..]
        forward(hidden_states, top_k_index, top_k_weights)    [N, D], [N, k], [N, k] -> [N, D]
    """
    return {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, Experts) or _is_stack(each)
    }


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module has the interface of experts in transformers."""
    number, own = getattr(module, "num_experts", None), [*module.parameters(recurse=False)]
    if not any(p.ndim == 3 for p in own) or any(p.shape[:1] != (number,) for p in own):
        return False
    # Further matrices, as of a parametrization, may be computed from all experts together.
    matrices = sum(p.ndim > 1 for p in module.parameters())
    _, *arguments = inspect.signature(type(module).forward).parameters
    return (
        matrices == sum(p.ndim > 1 for p in own)
        and len(arguments) == 3
        and "ind" in arguments[1]
        and "weights" in arguments[2]
    )


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter without its values; compared by identity.

    Attributes:
        names: all names of the parameter in the model, in the order of the model.
        block: block that contains the first name; empty outside of blocks.
        is_expert: whether dimension 0 counts experts, see `experts_of`.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    is_trained: bool
    is_contiguous: bool
    block: str = ""
    is_expert: bool = False

    @property
    def name(self) -> str:
        """First name of the parameter."""
        return self.names[0]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True)
class Skeleton:
    """The parameters and blocks of one rank's pipeline stages, or of the full model.

    Attributes:
        model: the full model, read only for its modules and never changed; for the skeleton of a
            shape, a decoder with one block of each kind.
        weights: the parameters of the rank; parameters of equal blocks are listed once.
        blocks: name of each block in `model` -> names of the rank's blocks that it represents.
        num_blocks: number of blocks of the full model.
        shape: shape of a decoder; None for other models.
        absent_modules: names of modules that only other ranks have.
    """

    model: nn.Module
    weights: tuple[Weight, ...]
    blocks: Mapping[str, tuple[str, ...]]
    num_blocks: int
    shape: ModelShape | None = None
    absent_modules: frozenset[str] = field(default_factory=frozenset[str])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter."""
        return self.weights[0].dtype

    def named(self, name: str) -> tuple[str, ...]:
        """Return the names on this rank of the module or parameter `name` of `model`.

        There are several names if the block of `name` represents others, and none if only other
        ranks have the module.
        """
        block = _within(name, self.blocks)
        if block:
            return tuple(f"{each}{name[len(block) :]}" for each in self.blocks[block])
        return () if _within(name, self.absent_modules) else (name,)

    def parameters(self) -> Iterator[Weight]:
        """Yield the parameters of the rank in the order of the model, once for each equal block."""
        for block, weights in groupby(self.weights, lambda weight: weight.block):
            of_block = [*weights]
            for _ in self.blocks.get(block, ("",)):
                yield from of_block

    def part(self, here: Collection[str], gone: Collection[str]) -> Skeleton:
        """Return the skeleton of a rank that has the modules `here` and lacks the modules `gone`.

        A tied weight with one name in `here` and another in `gone` stays, under its first name.
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
            if self.blocks.get(weight.block, (weight.block,)) != (weight.block,):
                # One weight represents all equal blocks: it stays if any of these blocks is here.
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
            absent_modules=frozenset(gone).difference(here),
        )


def skeleton_of(model: nn.Module) -> Skeleton:
    """Return the skeleton of an unsplit model on any device, without changing the model."""
    blocks = [name for name, _ in blocks_of(model)]
    return Skeleton(
        model=model,
        weights=_weights(model, blocks),
        blocks={name: (name,) for name in blocks},
        num_blocks=len(blocks),
        shape=model.shape if isinstance(model, Decoder) else None,
    )


@functools.lru_cache(maxsize=16)
def skeleton_of_shape(
    shape: ModelShape, master: torch.dtype, compute: torch.dtype | None = None
) -> Skeleton:
    """Return the skeleton of a decoder of `shape`; for the dtypes see `Decoder.on_meta`.

    The first block with an MLP and the first with experts represent all others, which differ from
    them only in attention windows: neither parameters nor messages depend on these.
    """
    num_dense = 0 if shape.experts is None else shape.experts.first_dense
    model = Decoder.on_meta(dataclasses.replace(shape, num_layers=num_dense + 1), master, compute)
    for index in range(1, num_dense):
        delattr(model.blocks, str(index))
    skeleton = skeleton_of(model)
    ends = (num_dense or shape.num_layers), shape.num_layers
    alike = {
        first: tuple(f"blocks.{index}" for index in range(int(first.rpartition(".")[2]), end))
        for first, end in zip(skeleton.blocks, ends, strict=False)
    }
    return dataclasses.replace(skeleton, blocks=alike, num_blocks=shape.num_layers, shape=shape)


def _weights(model: nn.Module, blocks: Iterable[str]) -> tuple[Weight, ...]:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    known = frozenset(blocks)
    experts = {p for each in experts_of(model).values() for p in each.parameters(recurse=False)}
    return tuple(
        Weight(
            names=tuple(all_names),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            is_trained=parameter.requires_grad,
            is_contiguous=parameter.is_contiguous(),
            block=_within(all_names[0], known),
            is_expert=parameter in experts,
        )
        for parameter, all_names in names.items()
    )


_Copied = TypeVar("_Copied", bound=tuple[object, ...])


def copied_on_meta(values: _Copied) -> _Copied:
    """Return meta-device deep copies of models and of objects that have models as attributes."""
    parts = [part for value in values for part in (value, *vars(value).values())]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    # The memo maps each tensor to its meta copy, so that deepcopy copies no tensor data.
    memo: dict[int, object] = {}
    for tensor in tensors:
        meta = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = meta
    return copy.deepcopy(values, memo)


def _within(name: str, names: Collection[str]) -> str:
    """Return the innermost of `names` that is `name` or a parent module of it; empty if none."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name
