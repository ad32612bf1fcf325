"""What travels together under fsdp: the groups of a model's parameters, and their bytes.

    module           group        under zero3
    tokens           embedding    gather, forward, free  ...          backward,       reduce
    blocks.0         block        gather, forward, free  ...  gather, backward, free, reduce
    blocks.1, last   block        gather, forward ...                 backward, free, reduce
    norm, output     head         gather, forward ...                 backward, free, reduce
    all others       rest         gather as the model begins, free and reduce when backward ends

A model names its embedding, whose backward reads no weight, and its head (`ends_of`); what it does
not name is of the rest.

A group is one message. Each of its parameters is split by rows, padded to a multiple of the ranks:

    up [5, 8], down [8, 5]    rank 0                          rank 1
    holds, float32            up rows 0-2, down rows 0-3      up rows 3-4, down rows 4-7
    sends into the gather     | up 3 x 8    | down 4 x 5 |    | up 2 x 8, 0 | down 4 x 5 |
    has gathered              up 5 x 8, down 8 x 5            the same

The gradients take the way back: all are full until the group is reduced to the rows of each rank.
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
from phalanx.parallel.blocks import ends_of
from phalanx.parallel.skeleton import Skeleton, Weight
from phalanx.parallel.split import Shapes

Place = Literal["embedding", "block", "head", "rest"]
Sums = Literal["none", "shards", "full"]


@dataclass(frozen=True)
class Parameter:
    """What sharding asks of a parameter: its shape, and whether it is trained."""

    shape: tuple[int, ...]
    is_trained: bool = True

    def padded(self, num_ranks: int) -> int:
        """Return the elements when the rows are padded to a multiple of `num_ranks`."""
        rows = -(-self.shape[0] // num_ranks) * num_ranks
        return rows * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Group:
    """Parameters that travel together.

    Attributes:
        place: where in the model it is.
        names: of its modules; ("",), the model itself, for the rest.
        parameters: in the order of the model.
        master: data type of the parameters, gradients and moments that a rank keeps.
        gathered: data type of the parameters as they are gathered.
        is_kept: zero3 keeps it from forward to backward: the last block, the head and the rest.
    """

    place: Place
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    master: torch.dtype
    gathered: torch.dtype
    is_kept: bool

    @property
    def is_gathered_again(self) -> bool:
        """Whether zero3 gathers it in backward too."""
        return self.place != "embedding" and not self.is_kept

    def parameter_bytes(self, num_ranks: int) -> int:
        """Return the bytes of the parameters of all ranks, padding included."""
        return sum(p.padded(num_ranks) for p in self.parameters) * self.master.itemsize

    def gathered_bytes(self, num_ranks: int) -> int:
        """Return the bytes of the parameters once they are gathered."""
        return sum(p.padded(num_ranks) for p in self.parameters) * self.gathered.itemsize

    def shard_bytes(self, num_ranks: int) -> int:
        """Return the bytes of a rank's shard of the gradients."""
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
    """Return the groups of a model that is not split yet, in the order of forward, then the rest.

    Args:
        skeleton: of what a rank has of the model.
        compute: data type of the blocks' arithmetic; their parameters' if None. Modules in
            no block are gathered as they are: the rows of an embedding add up many small gradients,
            which a narrow type would lose.
        shapes: of the shards that other axes have made of parameters, where they have.
        keeps: whether groups whose backward is near are kept until then.

    Raises:
        StrategyError: the model has no forward, a parameter belongs to two groups or cannot be
            split by rows, or a group has parameters of several data types.
    """
    _check_forward(skeleton.model)
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
        if not (own := members[names]):
            continue
        master = _data_type_of(own, names)
        group = Group(
            place=place,
            names=names,
            parameters=tuple(Parameter(known.get(w, w.shape), w.is_trained) for w in own),
            master=master,
            gathered=compute if compute is not None and place == "block" else master,
            is_kept=keeps and place in ("head", "rest"),
        )
        alike = skeleton.blocks[names[0]] if place == "block" else ()
        groups += [dataclasses.replace(group, names=(name,)) for name in alike] or [group]
    return _with_last_kept(groups) if keeps else groups


def _with_last_kept(groups: list[Group]) -> list[Group]:
    """Return the groups with the last block kept: its backward is the first of all blocks."""
    blocks = [number for number, group in enumerate(groups) if group.place == "block"]
    for number in blocks[-1:]:
        groups[number] = dataclasses.replace(groups[number], is_kept=True)
    return groups


def _check_forward(model: nn.Module) -> None:
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise StrategyError(
            f"fsdp: the model is a {type(model).__name__}, which has no forward to gather for; "
            "wrap it in a module that has one, or use dp"
        )


def _data_type_of(weights: Iterable[Weight], names: Sequence[str]) -> torch.dtype:
    """Return the one data type of the parameters of a group, given by the names of its modules."""
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) > 1:
        raise StrategyError(
            f"fsdp: the parameters of '{', '.join(names) or 'the model'}' are of several data "
            f"types, {', '.join(sorted(map(str, dtypes)))}, and travel together; cast them to one"
        )
    return dtypes.pop()


def _members(
    weights: Iterable[Weight], groups: Iterable[tuple[str, ...]]
) -> dict[tuple[str, ...], list[Weight]]:
    """Return the parameters of each group, given by the names of its modules."""
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
                    f"fsdp: '{weight.name}' and '{name}' are one parameter, of two groups that "
                    "are gathered apart; hold it outside the blocks and the `ends` of the model, "
                    "or use dp"
                )
        members[homes[0]].append(weight)
        if not math.prod(weight.shape) or not weight.shape:
            raise StrategyError(
                f"fsdp: the parameter '{weight.name}' of shape {weight.shape} has no rows that "
                "could be split; make it of shape (1,), or use dp"
            )
        if not weight.is_contiguous:
            raise StrategyError(
                f"fsdp: the parameter '{weight.name}' is not contiguous, so its rows cannot travel "
                "as they lie; make it `nn.Parameter(weight.contiguous())`, or use dp"
            )
    return members


def most_gathered(groups: Sequence[Group], num_ranks: int, segment_size: int) -> int:
    """Return the bytes that zero3 has gathered when they are the most.

    That is the rest, and beside it one of

        the embedding                                     until its forward ends
        the last block, which is kept, and the head       until the head's backward ends
        the blocks at work in backward, and the next one  gathered before they end
    """
    sizes = [(g.place, g.gathered_bytes(num_ranks)) for g in groups]
    embedding, head, rest = (
        sum(size for place, size in sizes if place == wanted)
        for wanted in ("embedding", "head", "rest")
    )
    blocks = [size for place, size in sizes if place == "block"]
    starts = range(max(1, len(blocks) - segment_size))
    at_work = [sum(blocks[start : start + segment_size + 1]) for start in starts]
    return rest + max(embedding, sum(blocks[-1:]) + head, *at_work)


def most_gradients(groups: Sequence[Group], num_ranks: int, sums: Sums) -> int:
    """Return the bytes of gradients, full ones and shards, when they are the most.

    Backward goes from the head over the blocks to the embedding. The gradients of a group are full
    until it is left, the gradients of the rest until the end; `sums` is what earlier microbatches
    have left. FSDP2 frees the last gradient of a group when the shard of the group is there, the
    others before.
    """
    order = [g for g in reversed(groups) if g.place != "rest"]
    order += [g for g in groups if g.place == "rest"]
    shards = [g.shard_bytes(num_ranks) for g in order]
    full = [g.full_bytes(g.master if sums == "full" else g.gathered) for g in order]
    left = [shard if sums == "shards" else 0 for shard in shards]
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
