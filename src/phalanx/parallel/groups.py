"""The parameter groups of fsdp, which are gathered and reduced as one message, and their bytes.

    module           group        under zero3
    tokens           embedding    gather, forward, free  ...          backward,       reduce
    blocks.0         block        gather, forward, free  ...  gather, backward, free, reduce
    blocks.1, last   block        gather, forward ...                 backward, free, reduce
    norm, output     head         gather, forward ...                 backward, free, reduce
    all others       rest         gather when forward begins, free and reduce when backward ends

A model names its embedding, whose backward reads no weight, and its head (`ends_of`). Parameters
outside of these and of the blocks form the rest.

A group is one message. Each of its parameters is split by rows, padded to a multiple of the ranks:

    up [5, 8], down [8, 5]    rank 0                          rank 1
    stores, float32           up rows 0-2, down rows 0-3      up rows 3-4, down rows 4-7
    sends in the gather       | up 3 x 8    | down 4 x 5 |    | up 2 x 8, 0 | down 4 x 5 |
    has after the gather      up 5 x 8, down 8 x 5            the same

Gradients go the opposite way: they are full until a reduce-scatter of the group leaves each rank
the gradients of its rows.

Experts that `ep` has split are sharded over fewer ranks than the rest of their block: a group of
their own, which is gathered and reduced beside the other one. fsdp splits them by experts if each
of its ranks gets as many; else within each expert, by the first dimension that the ranks divide,
because whole experts would be padded (2 experts on 3 ranks: a third of the message):

    gate [8, 96, 64] over ep 2: [4, 96, 64]    2 shards [2, 96, 64]    3 shards [4, 32, 64]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from phalanx.comm.axes import DENSE, EXPERT, ParameterAxes, axes_of
from phalanx.errors import StrategyError
from phalanx.parallel.skeleton import Weight, ends_of
from phalanx.parallel.split import Target

Place = Literal["embedding", "block", "head", "rest"]
AccumulatedGradients = Literal["none", "shards", "full"]


@dataclass(frozen=True)
class Parameter:
    """A parameter as sharding needs it; its shards of dimension `dim` are stored in `dtype`."""

    shape: tuple[int, ...]
    is_trained: bool = True
    dtype: torch.dtype = torch.float32
    dim: int = 0

    def padded(self, num_shards: int) -> int:
        """Return the number of elements with rows padded to a multiple of `num_shards`."""
        num_rows = self.shape[self.dim]
        rows = -(-num_rows // num_shards) * num_shards
        return rows * (math.prod(self.shape) // num_rows)


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together.

    Attributes:
        place: kind of the group by its place in the model.
        names: names of its modules; ("",), the model itself, for the rest.
        parameters: its parameters, in the order of the model.
        master: dtype of the stored shards of trained parameters, gradients and moments.
        gathered: dtype in which the parameters are gathered if it is not `master`; else each is
            gathered in its own, and a frozen parameter may have another.
        stays_gathered: whether zero3 keeps the group gathered from forward to backward: without a
            pipeline the last block, the head and the rest.
        num_shards: number of shards of each parameter.
        axes: the sets of axes of its parameters.
    """

    place: Place
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    master: torch.dtype
    gathered: torch.dtype
    stays_gathered: bool
    num_shards: int
    axes: ParameterAxes = DENSE

    @property
    def is_gathered_again(self) -> bool:
        """Whether zero3 gathers the group a second time, in backward."""
        return self.place != "embedding" and not self.stays_gathered

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the stored parameters of all shards together, with padding."""
        return sum(p.padded(self.num_shards) * p.dtype.itemsize for p in self.parameters)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered parameters, with padding."""
        cast = None if self.gathered == self.master else self.gathered
        return sum(p.padded(self.num_shards) * (cast or p.dtype).itemsize for p in self.parameters)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard of the gradients, with padding."""
        num = sum(p.padded(self.num_shards) for p in self.parameters if p.is_trained)
        return num // self.num_shards * self.master.itemsize

    def full_bytes(self, dtype: torch.dtype) -> list[int]:
        """Return the bytes of each full gradient, as a tensor of `dtype`."""
        return [p.padded(1) * dtype.itemsize for p in self.parameters if p.is_trained]


def groups_of(target: Target, *, keeps: bool = True) -> list[Group]:
    """Return the groups of a model that fsdp has not split, in forward order, then the rest.

    Blocks are gathered in the dtype in which they compute. Modules outside of blocks are gathered
    in the dtype of their parameters: rows of an embedding accumulate many small gradients, which a
    narrow dtype would lose.

    Args:
        target: the model, its strategy, and the shapes of shards that earlier axes have left.
        keeps: whether groups whose backward comes soon stay gathered until then.

    Raises:
        StrategyError: the model has no forward, a parameter belongs to two groups or cannot be
            split by rows, or a group has trained parameters of several dtypes.
    """
    skeleton, compute = target.skeleton, target.compute
    if isinstance(skeleton.model, nn.ModuleList | nn.ModuleDict):
        raise StrategyError(
            f"fsdp: the model is a {type(skeleton.model).__name__}, which has no forward before "
            "which fsdp could gather parameters; wrap it in a module that has a forward, or use dp"
        )
    embedding, head = (
        tuple(name for name in names if skeleton.named(name)) for names in ends_of(skeleton.model)
    )
    places: dict[tuple[str, ...], Place] = {
        embedding: "embedding",
        **{(block,): "block" for block in skeleton.blocks},
        head: "head",
        ("",): "rest",
    }
    members, mesh_axes = _members(skeleton.weights, places), target.strategy.mesh_axes()
    groups: list[Group] = []
    for (names, place), axes in itertools.product(places.items(), (DENSE, EXPERT)):
        if not (weights := [w for w in members[names] if target.axes_of(w) == axes]):
            continue
        types = {weight.dtype for weight in weights if weight.is_trained}
        master, *others = sorted(types or {weights[0].dtype}, key=str)
        if others:
            raise StrategyError(
                f"fsdp: the trained parameters of '{', '.join(names) or 'the model'}' are of "
                f"several data types, {', '.join(map(str, (master, *others)))}, and their "
                "gradients are reduced together; cast them to one data type"
            )
        # Blocks cast a narrower frozen weight themselves: gathering it wider would cost bytes.
        is_cast = place == "block" and compute is not None and compute.itemsize < master.itemsize
        num_shards = math.prod(mesh_axes[axis] for axis in axes_of(axes.shards, mesh_axes))
        # Of uneven shards of a part of a dimension, DTensor does not know the offsets.
        shapes = ((w, target.shape(w)) for w in weights if axes.split)
        odd = (w for w, shape in shapes if shape[shard_dim(shape, num_shards)] % num_shards)
        if (weight := next(odd, None)) is not None:
            raise StrategyError(
                f"{target.strategy}: fsdp splits '{weight.name}' {target.shape(weight)} of each "
                f"rank of {axes.split} into {num_shards} shards, which no dimension is a multiple "
                f"of; write '{target.strategy.with_degree('fsdp', 1)}'"
            )
        group = Group(
            place=place,
            names=names,
            parameters=tuple(
                Parameter(
                    *(target.shape(w), w.is_trained, w.dtype),
                    dim=shard_dim(target.shape(w), num_shards) if w.is_expert else 0,
                )
                for w in weights
            ),
            master=master,
            gathered=compute if is_cast and compute is not None else master,
            stays_gathered=keeps and place in ("head", "rest"),
            num_shards=num_shards,
            axes=axes,
        )
        alike = skeleton.blocks[names[0]] if place == "block" else ()
        groups += [dataclasses.replace(group, names=(name,)) for name in alike] or [group]
    blocks = [group.names for group in groups if group.place == "block"]
    # The backward of the last block is the first of all blocks.
    last = max(blocks, key=blocks.index, default=None) if keeps else None
    return [dataclasses.replace(g, stays_gathered=True) if g.names == last else g for g in groups]


def shard_dim(shape: Sequence[int], num_shards: int) -> int:
    """Return the dimension by which fsdp splits the experts [E, ..] of a rank, see the top."""
    return next((dim for dim, size in enumerate(shape) if size % num_shards == 0), 0)


def _members(
    weights: Iterable[Weight], groups: Iterable[tuple[str, ...]]
) -> dict[tuple[str, ...], list[Weight]]:
    """Return the parameters of each group; a group is given by the names of its modules."""
    members: dict[tuple[str, ...], list[Weight]] = {names: [] for names in groups}
    group_of = {name: names for names in members for name in names}
    for weight in weights:
        homes: list[tuple[str, ...]] = []
        for name in weight.names:
            ends = [end for end, letter in enumerate(name) if letter == "."]
            module = next((name[:end] for end in ends if name[:end] in group_of), "")
            homes.append(group_of[module])
            if homes[-1] != homes[0]:
                raise StrategyError(
                    f"fsdp: '{weight.name}' and '{name}' are one parameter that belongs to two "
                    "groups, which are gathered separately; register it outside the blocks and "
                    "the `ends` of the model, or use dp"
                )
        members[homes[0]].append(weight)
        if not math.prod(weight.shape) or not weight.shape:
            raise StrategyError(
                f"fsdp: the parameter '{weight.name}' of shape {weight.shape} has no rows that "
                "could be split; make it of shape (1,), or use dp"
            )
        if not weight.is_contiguous:
            raise StrategyError(
                f"fsdp: the parameter '{weight.name}' is not contiguous, and fsdp can send only "
                "contiguous rows; make it `nn.Parameter(weight.contiguous())`, or use dp"
            )
    return members


def peak_gathered_bytes(groups: Sequence[Group], segment_size: int) -> int:
    """Return the peak bytes of parameters that zero3 holds gathered.

    The peak is the rest plus the largest of

        the embedding                                     until its forward ends
        the last block, which is kept, and the head       until the head's backward ends
        the segment that backward computes, and the next block, which is prefetched
    """
    embedding, head, rest = (
        sum(g.gathered_bytes for g in groups if g.place == wanted)
        for wanted in ("embedding", "head", "rest")
    )
    blocks = [
        sum(g.gathered_bytes for g in of_block)
        for of_block in _by_module(g for g in groups if g.place == "block")
    ]
    starts = range(max(1, len(blocks) - segment_size))
    # Blocks 0 to 4 in segments of 2: backward computes 2 and 3 while 1 is prefetched: 1 2 3 count.
    at_work = [sum(blocks[start : start + segment_size + 1]) for start in starts]
    return rest + max(embedding, sum(blocks[-1:]) + head, *at_work)


def _by_module(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups that are gathered together: one, or two with experts that ep splits."""
    found: list[list[Group]] = []
    for group in groups:
        beside = (of for of in found if group.axes != DENSE and of[0].names == group.names)
        if (of := next(beside, None)) is not None:
            of.append(group)
        else:
            found.append([group])
    return found


def peak_gradient_bytes(groups: Sequence[Group], sums: AccumulatedGradients) -> int:
    """Return the peak bytes of gradients, full gradients and shards together.

    Backward runs from the head through the blocks to the embedding. The gradients of a group are
    full until backward leaves the group, and the gradients of the rest until backward ends. FSDP2
    frees all full gradients of a group before the reduction, except the last one, which it frees
    once the shard exists.

    Args:
        groups: the groups of the model.
        sums: gradients that earlier microbatches have left: none, shards or full ones.
    """
    modules = _by_module(groups)
    order = [of for of in reversed(modules) if of[0].place != "rest"]
    order += [of for of in modules if of[0].place == "rest"]
    shards = [sum(g.shard_bytes for g in of) for of in order]
    full = [
        [size for g in of for size in g.full_bytes(g.master if sums == "full" else g.gathered)]
        for of in order
    ]
    left = [shard if sums == "shards" else 0 for shard in shards]
    # Group n in backward, from the head on:
    #
    #   groups before n    shards only
    #   group n            its full gradients, then the last one of them beside the new shard
    #   groups after n     what earlier microbatches left: nothing, shards or full gradients
    waiting = [
        left[n] + (sum(full[n]) if sums == "full" or of[0].place == "rest" else 0)
        for n, of in enumerate(order)
    ]
    return max(
        sum(shards[:n])
        + max(sum(full[n]), sum(full[n][-1:]) + shards[n])
        + left[n]
        + sum(waiting[n + 1 :])
        for n in range(len(order))
    )
