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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from phalanx.errors import StrategyError
from phalanx.parallel.skeleton import Skeleton, Weight, ends_of
from phalanx.parallel.split import Shapes

Place = Literal["embedding", "block", "head", "rest"]
AccumulatedGradients = Literal["none", "shards", "full"]


@dataclass(frozen=True)
class Parameter:
    """A parameter as sharding needs it; its shards are stored in `dtype`."""

    shape: tuple[int, ...]
    is_trained: bool = True
    dtype: torch.dtype = torch.float32

    def padded(self, num_ranks: int) -> int:
        """Return the number of elements with rows padded to a multiple of `num_ranks`."""
        rows = -(-self.shape[0] // num_ranks) * num_ranks
        return rows * math.prod(self.shape[1:])


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
    """

    place: Place
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    master: torch.dtype
    gathered: torch.dtype
    stays_gathered: bool

    @property
    def is_gathered_again(self) -> bool:
        """Whether zero3 gathers the group a second time, in backward."""
        return self.place != "embedding" and not self.stays_gathered

    def parameter_bytes(self, num_ranks: int) -> int:
        """Return the bytes of the stored parameters of all ranks together, with padding."""
        return sum(p.padded(num_ranks) * p.dtype.itemsize for p in self.parameters)

    def gathered_bytes(self, num_ranks: int) -> int:
        """Return the bytes of the gathered parameters, with padding."""
        cast = None if self.gathered == self.master else self.gathered
        return sum(p.padded(num_ranks) * (cast or p.dtype).itemsize for p in self.parameters)

    def shard_bytes(self, num_ranks: int) -> int:
        """Return the bytes of one rank's shard of the gradients, with padding."""
        sizes = (p.padded(num_ranks) // num_ranks for p in self.parameters if p.is_trained)
        return sum(sizes) * self.master.itemsize

    def full_bytes(self, dtype: torch.dtype) -> list[int]:
        """Return the bytes of each full gradient, as a tensor of `dtype`."""
        return [p.padded(1) * dtype.itemsize for p in self.parameters if p.is_trained]


def groups_of(
    skeleton: Skeleton,
    compute: torch.dtype | None = None,
    shapes: Shapes | None = None,
    *,
    keeps: bool = True,
) -> list[Group]:
    """Return the groups of a model that fsdp has not split, in forward order, then the rest.

    Args:
        skeleton: skeleton of the part of the model that a rank has.
        compute: dtype in which blocks compute and are gathered; the dtype of their parameters if
            None. Modules outside of blocks are gathered in the dtype of their parameters: rows of
            an embedding accumulate many small gradients, which a narrow dtype would lose.
        shapes: shapes of the shards of parameters that earlier axes have split.
        keeps: whether groups whose backward comes soon stay gathered until then.

    Raises:
        StrategyError: the model has no forward, a parameter belongs to two groups or cannot be
            split by rows, or a group has trained parameters of several dtypes.
    """
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
    members, known = _members(skeleton.weights, places), shapes or {}
    groups: list[Group] = []
    for names, place in places.items():
        if not (weights := members[names]):
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
        group = Group(
            place=place,
            names=names,
            parameters=tuple(
                Parameter(known.get(w, w.shape), w.is_trained, w.dtype) for w in weights
            ),
            master=master,
            gathered=compute if is_cast and compute is not None else master,
            stays_gathered=keeps and place in ("head", "rest"),
        )
        alike = skeleton.blocks[names[0]] if place == "block" else ()
        groups += [dataclasses.replace(group, names=(name,)) for name in alike] or [group]
    blocks = [number for number, group in enumerate(groups) if group.place == "block"]
    if keeps and blocks:  # the backward of the last block is the first of all blocks
        last = blocks[-1]
        groups[last] = dataclasses.replace(groups[last], stays_gathered=True)
    return groups


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


def peak_gathered_bytes(groups: Sequence[Group], num_ranks: int, segment_size: int) -> int:
    """Return the peak bytes of parameters that zero3 holds gathered.

    The peak is the rest plus the largest of

        the embedding                                     until its forward ends
        the last block, which is kept, and the head       until the head's backward ends
        the segment that backward computes, and the next block, which is prefetched
    """
    sizes = [(g.place, g.gathered_bytes(num_ranks)) for g in groups]
    embedding, head, rest = (
        sum(size for place, size in sizes if place == wanted)
        for wanted in ("embedding", "head", "rest")
    )
    blocks = [size for place, size in sizes if place == "block"]
    starts = range(max(1, len(blocks) - segment_size))
    # Blocks 0 to 4 in segments of 2: backward computes 2 and 3 while 1 is prefetched: 1 2 3 count.
    at_work = [sum(blocks[start : start + segment_size + 1]) for start in starts]
    return rest + max(embedding, sum(blocks[-1:]) + head, *at_work)


def peak_gradient_bytes(groups: Sequence[Group], num_ranks: int, sums: AccumulatedGradients) -> int:
    """Return the peak bytes of gradients, full gradients and shards together.

    Backward runs from the head through the blocks to the embedding. The gradients of a group are
    full until backward leaves the group, and the gradients of the rest until backward ends. FSDP2
    frees all full gradients of a group before the reduction, except the last one, which it frees
    once the shard exists.

    Args:
        groups: the groups of the model.
        num_ranks: number of shards.
        sums: gradients that earlier microbatches have left: none, shards or full ones.
    """
    order = [g for g in reversed(groups) if g.place != "rest"]
    order += [g for g in groups if g.place == "rest"]
    shards = [g.shard_bytes(num_ranks) for g in order]
    full = [g.full_bytes(g.master if sums == "full" else g.gathered) for g in order]
    left = [shard if sums == "shards" else 0 for shard in shards]
    # Group n in backward, from the head on:
    #
    #   groups before n    shards only
    #   group n            its full gradients, then the last one of them beside the new shard
    #   groups after n     what earlier microbatches left: nothing, shards or full gradients
    waiting = [
        left[n] + (sum(full[n]) if sums == "full" or g.place == "rest" else 0)
        for n, g in enumerate(order)
    ]
    return max(
        sum(shards[:n])
        + max(sum(full[n]), sum(full[n][-1:]) + shards[n])
        + left[n]
        + sum(waiting[n + 1 :])
        for n in range(len(order))
    )
