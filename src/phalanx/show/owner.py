"""Sharded weights in two forms: each layer whole on an owner rank, or each layer sharded.

    owner    layer l is whole on rank l mod N         broadcast, compute, free; gradients are
                                                      reduced to the owner
    shards   every layer is split over all N ranks    all-gather, compute, free; gradients are
                                                      reduce-scattered (fully_shard, ours)

Both store each weight once. With owners, one rank sends a layer while the others receive, and the
memory of a rank depends on the sizes of its layers. With shards, all links carry the same bytes and
all ranks store the same bytes for any sizes of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import collectives
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.launch.local import run_ranks
from phalanx.show.one_step import holdings, journal, take_step
from phalanx.show.shown import Grid, Shown, ShowRun
from phalanx.show.strategies import STRATEGIES

WIDTHS: Final = (16, 16, 48, 16, 16)
"""Numbers of features between layers; they differ, so that layers have different sizes."""

ROWS: Final = 4


class LayerRun(NamedTuple):
    """Bytes of one layer that a rank stores between steps, and sends in a step."""

    held_bytes: int
    sent_bytes: int


def show_fsdp(config: ShowRun) -> Shown:
    """Run both forms by hand on a chain of layers, and fsdp on a decoder."""
    num_ranks = config.ranks
    parts = list[Grid | str]()
    ends = list[list[Tensor]]()
    for name, form in FORMS.items():
        found = run_ranks(run_layers, num_ranks, name, threads=1)
        layers = [layers for layers, _ in found]
        ends += [gradients for _, gradients in found]
        rows = [
            [
                str(rank),
                *(f"{layer.held_bytes:,} / {layer.sent_bytes:,}" for layer in of_rank),
                f"{sum(layer.held_bytes for layer in of_rank):,}",
                f"{sum(layer.sent_bytes for layer in of_rank):,}",
            ]
            for rank, of_rank in enumerate(layers)
        ]
        heads = ["rank", *(f"layer {n}" for n in range(len(WIDTHS) - 1)), "holds", "sends"]
        parts.append(Grid(f"{form.about}: bytes held / sent, per layer", heads, rows, heads))
    same = all(torch.allclose(a, b) for end in ends for a, b in zip(end, ends[0], strict=True))
    parts.append(
        "Both forms give the same gradients on all ranks." if same else
        "The gradients of the two forms differ: a bug in Phalanx."
    )  # fmt: skip
    steps = run_ranks(take_step, num_ranks, STRATEGIES["zero3"], threads=1)
    parts += [holdings(steps), journal(steps[0].events)]
    parts.append(
        "Overlap: the last gather before `forward block 0` is for block 1, and runs while block 0 "
        "computes. The gather after `backward block 1` is for block 0, and runs during that "
        "backward; a reduction runs during the backward that follows it."
    )
    return Shown(
        f"sharded weights by owners and by shards, {num_ranks} ranks",
        ["A rank has the full weights of a layer only while that layer computes."],
        parts,
        "fully_shard(module)",
    )


class ShardingForm(NamedTuple):
    """A form of sharding a layer over ranks.

    Attributes:
        hold: returns the part of a full weight that this rank stores.
        fetch: fills the full weight of a layer from the parts that the ranks store.
        give: reduces a full gradient; returns the part of the sum that this rank stores.
    """

    about: str
    hold: Callable[[Tensor, int], Tensor]
    fetch: Callable[[Tensor, Tensor, int], None]
    give: Callable[[Tensor, int], Tensor]


def _owner(layer: int) -> int:
    return layer % dist.get_world_size()


def _own_whole(weight: Tensor, layer: int) -> Tensor:
    return weight.clone() if dist.get_rank() == _owner(layer) else weight[:0].clone()


def _broadcast(whole: Tensor, held: Tensor, layer: int) -> None:
    if len(held):
        whole.copy_(held)
    collectives.broadcast(whole, _owner(layer), algorithm="direct")


def _reduce(gradient: Tensor, layer: int) -> Tensor:
    collectives.reduce(gradient, root=_owner(layer), algorithm="direct")
    return gradient if dist.get_rank() == _owner(layer) else gradient[:0]


def _own_shard(weight: Tensor, layer: int) -> Tensor:
    del layer
    padded = torch.zeros(-(-len(weight) // _size()) * _size(), weight.shape[1], dtype=weight.dtype)
    padded[: len(weight)] = weight
    return padded.chunk(_size())[dist.get_rank()].clone()


def _gather(whole: Tensor, held: Tensor, layer: int) -> None:
    del layer
    padded = held.new_empty(_size() * len(held), held.shape[1])
    collectives.all_gather(padded, held)
    whole.copy_(padded[: len(whole)])


def _reduce_scatter(gradient: Tensor, layer: int) -> Tensor:
    shard = torch.zeros_like(_own_shard(gradient, layer))
    padded = gradient.new_zeros(_size() * len(shard), gradient.shape[1])
    padded[: len(gradient)] = gradient
    collectives.reduce_scatter(shard, padded)
    return shard


def _size() -> int:
    return dist.get_world_size()


FORMS: Final = {
    "owner": ShardingForm("one owner per layer", _own_whole, _broadcast, _reduce),
    "shards": ShardingForm("one shard per rank", _own_shard, _gather, _reduce_scatter),
}


def run_layers(name: str) -> tuple[list[LayerRun], list[Tensor]]:
    """Run a chain of layers forward and backward on this rank's rows.

    Returns:
        Bytes of each layer that this rank stores and sends, and the full gradients.
    """
    form, rank, comm = FORMS[name], dist.get_rank(), Ranks({"dp": dist.get_world_size()})
    collectives.barrier()  # connects the ranks
    draw = torch.Generator().manual_seed(0)
    sizes = [*zip(WIDTHS[1:], WIDTHS[:-1], strict=True)]
    weights = [torch.randn(size, generator=draw, dtype=torch.float64) / 4 for size in sizes]
    held = [form.hold(weight, layer) for layer, weight in enumerate(weights)]
    sent = [0] * len(sizes)

    def counted(layer: int, call: Callable[[], Tensor | None]) -> Tensor | None:
        with Ledger(comm) as ledger:
            result = call()
        sent[layer] += int(sum(entry.sent_bytes for entry in ledger.entries()))
        return result

    def fetched(layer: int) -> Tensor:
        whole = torch.zeros(sizes[layer], dtype=torch.float64)
        counted(layer, lambda: form.fetch(whole, held[layer], layer))
        return whole

    x = torch.randn(ROWS, WIDTHS[0], generator=draw.manual_seed(1 + rank), dtype=torch.float64)
    inputs = list[Tensor]()
    for layer in range(len(sizes)):
        inputs.append(x)
        x = x @ fetched(layer).T
    d_x, ends = x, list[Tensor]()  # the loss is half the sum of squares of x
    for layer in reversed(range(len(sizes))):
        weight, d_weight = fetched(layer), d_x.T @ inputs[layer]
        d_x = d_x @ weight
        part = counted(layer, lambda g=d_weight, at=layer: form.give(g, at))
        whole = torch.zeros(sizes[layer], dtype=torch.float64)
        assert part is not None
        form.fetch(whole, part, layer)  # not counted, because it is only for the comparison
        ends.append(whole)
    return [LayerRun(h.nbytes, s) for h, s in zip(held, sent, strict=True)], ends
