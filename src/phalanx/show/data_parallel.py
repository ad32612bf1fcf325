"""Two ways to share a batch, and two ways to share the weights, each with its bytes.

A step with a main device, rank 0, as in torch.nn.DataParallel, on rows that all ranks share:

    1  broadcast  the weights                      main -> other ranks
    2  scatter    the rows of the batch            main -> other ranks
    3  forward    each rank on its rows
    4  gather     the outputs                      other ranks -> main
    5  loss       main, over all rows
    6  scatter    the gradients of the outputs     main -> other ranks
    7  backward   each rank on its rows
    8  reduce     the gradients of all weights     other ranks -> main
    9  update     main only; step 1 of the next step replaces the old weights of the other ranks

Without a main device, each rank computes the loss of its rows, and an all-reduce sums gradients.

Sharded weights, each stored once:

    owner    layer l is whole on rank l mod N         broadcast, compute, free; gradients are
                                                      reduced to the owner
    shards   every layer is split over all N ranks    all-gather, compute, free; gradients are
                                                      reduce-scattered (fully_shard, ours)

With owners, one rank sends a layer while the others receive, and the memory of a rank depends on
the sizes of its layers. With shards, all links carry the same bytes and all ranks store the same
bytes for any sizes of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import collectives
from phalanx.comm.algorithms.catalogue import list_steps
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.launch.local import run_ranks
from phalanx.report.tabular import Table
from phalanx.show.one_step import holdings, journal, take_step
from phalanx.show.shown import Shown, ShowRun
from phalanx.show.strategies import STRATEGIES

ROWS_OF_RANK: Final = 4
WIDTHS: Final = (16, 32, 8)
"""Numbers of input, hidden and output features of the network of `show_data_parallel`."""

LAYERS: Final = ((16, 16), (48, 16), (16, 48), (16, 16))
"""Sizes of the layers of `show_fsdp`: rows, columns."""


class CallMade(NamedTuple):
    """A collective of the step.

    `number` is its number in the list above, `what` the data, `num_bytes` the bytes of the full
    tensor, and `sent` the bytes that this rank sent.
    """

    number: int
    collective: str
    what: str
    num_bytes: int
    sent: int


def counter() -> Callable[..., int]:
    """Return a function that calls a collective, and returns the bytes that this rank sends."""
    comm = Ranks({"dp": dist.get_world_size()})
    collectives.barrier()  # connects the ranks

    def sent_in(call: Callable[..., object], *args: Any, **how: Any) -> int:
        with Ledger(comm) as ledger:
            call(*args, **how)
        return int(sum(entry.sent_bytes for entry in ledger.entries()))

    return sent_in


def show_data_parallel(config: ShowRun) -> Shown:
    """Run both kinds of step on ranks, and compare their gradients with one process."""
    num_ranks, parts = config.ranks, list[Table | str]()
    model, (x, y) = make_model(), batch(num_ranks)
    F.mse_loss(model(x), y).backward()
    alone = gradients(model)
    for title, step, algorithm, whose, of in (
        ("with a main device", step_with_main_device, "direct", "the main device", 0),
        ("without", step_without, "ring", "every rank", -1),
    ):
        ranks = run_ranks(step, num_ranks, threads=1)
        of_first, totals = ranks[0][0], list[list[str]]()
        for rank, (calls, _) in enumerate(ranks):
            received = 0
            for call in of_first:
                steps = list_steps(call.collective, algorithm, num_ranks)
                moves = [move for step in steps for move in step.moves if move.target == rank]
                num_chunks = sum(len(move.chunks) for move in moves)
                received += num_chunks * call.num_bytes // num_ranks
            totals.append([str(rank), f"{sum(call.sent for call in calls):,}", f"{received:,}"])
        heads, of_ranks = (
            ["step", "collective", "what", "bytes"],
            ["rank", "sent, counted", "received, from the steps"],
        )
        rows = [[str(c.number), c.collective, c.what, f"{c.num_bytes:,}"] for c in of_first]
        gap = float((ranks[of][1] - alone).abs().max())
        parts += [
            Table(title, heads, rows, ["bytes"]),
            Table("", of_ranks, totals, of_ranks),
            f"The gradients of {whose} differ from one process's by {gap:.1e} at most, in float64.",
        ]
    parts.append(
        f"In each step the main device sends and receives {num_ranks - 1} times the weights, and "
        "stores the outputs of the whole batch; in an all-reduce each rank sends less than 2 times "
        "the weights, for any number of ranks."
    )
    return Shown(
        f"data parallelism with a main device and without, {num_ranks} ranks",
        ["Every rank computes different rows of one batch with the same weights."],
        parts,
        "torch.nn.DataParallel(model) has a main device; DistributedDataParallel(model) has none",
    )


def step_with_main_device() -> tuple[list[CallMade], Tensor]:
    """Run the step listed above; return its collectives, and the gradients on rank 0."""
    rank, num_ranks, sent_in = dist.get_rank(), dist.get_world_size(), counter()
    model, (x, y), calls = make_model(), batch(num_ranks), list[CallMade]()

    def run(number: int, call: Any, what: str, whole: Tensor, *others: Tensor) -> None:
        sent = sent_in(call, *others, whole, algorithm="direct")
        calls.append(CallMade(number, call.__name__, what, whole.nbytes, sent))

    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    if rank:
        weights.zero_()
    run(1, collectives.broadcast, "the weights", weights)
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    rows = torch.empty_like(x[:ROWS_OF_RANK])
    run(2, collectives.scatter, "the rows", x, rows)
    output = model(rows)
    outputs = torch.empty(len(x), WIDTHS[-1], dtype=x.dtype)
    sent = sent_in(collectives.gather, outputs, output.detach(), algorithm="direct")
    calls.append(CallMade(4, "gather", "the outputs", outputs.nbytes, sent))
    d_outputs, d_output = torch.zeros_like(outputs), torch.empty_like(output)
    if rank == 0:
        (d_outputs,) = torch.autograd.grad(F.mse_loss(outputs.requires_grad_(), y), outputs)
    run(6, collectives.scatter, "the gradients of the outputs", d_outputs, d_output)
    output.backward(d_output)
    flat = gradients(model)
    run(8, collectives.reduce, "the gradients", flat)
    return calls, flat


def step_without() -> tuple[list[CallMade], Tensor]:
    """Run the step without a main device; return its collectives and gradients."""
    rank, num_ranks, sent_in = dist.get_rank(), dist.get_world_size(), counter()
    model = make_model()
    x, y = (whole.chunk(num_ranks)[rank] for whole in batch(num_ranks))
    (F.mse_loss(model(x), y) / num_ranks).backward()
    flat = gradients(model)
    size = flat.numel()
    padded = F.pad(flat, (0, -size % num_ranks))
    sent = sent_in(collectives.all_reduce, padded)
    return [CallMade(2, "all-reduce", "the gradients", padded.nbytes, sent)], padded[:size]


def make_model() -> nn.Sequential:
    """Return the same small network on every rank."""
    torch.manual_seed(0)
    inner = nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh(), nn.Linear(WIDTHS[1], WIDTHS[2])
    return nn.Sequential(*inner).double()


def batch(num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the global batch."""
    draw = torch.Generator().manual_seed(1)
    sizes = ((num_ranks * ROWS_OF_RANK, width) for width in (WIDTHS[0], WIDTHS[-1]))
    x, y = (torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes)
    return x, y


def gradients(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters, one after the other."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def show_fsdp(config: ShowRun) -> Shown:
    """Fetch the layers and reduce their gradients in both forms, then run fsdp on a decoder."""
    num_ranks = config.ranks
    ranks = run_ranks(exchange_layers, num_ranks, threads=1)
    parts, heads = list[Table | str](), ["rank", *(f"layer {n}" for n in range(len(LAYERS)))]
    for number, about in enumerate(("one owner per layer", "one shard per rank")):
        rows = [
            [
                str(rank),
                *(f"{held:,} / {sent:,}" for held, sent in forms[number]),
                *(f"{sum(column):,}" for column in zip(*forms[number], strict=True)),
            ]
            for rank, forms in enumerate(ranks)
        ]
        all_heads = [*heads, "holds", "sends"]
        parts.append(Table(f"{about}: bytes held / sent, per layer", all_heads, rows, all_heads))
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


def exchange_layers() -> list[list[tuple[int, int]]]:
    """Fetch each layer and reduce its gradient, first with owners, then with shards.

    Returns:
        Of each form and layer, the bytes that this rank stores, and sends in a step.
    """
    rank, num_ranks, sent_in = dist.get_rank(), dist.get_world_size(), counter()
    owners, shards = list[tuple[int, int]](), list[tuple[int, int]]()
    for layer, (num_rows, num_columns) in enumerate(LAYERS):
        owner, whole = layer % num_ranks, torch.ones(num_rows, num_columns, dtype=torch.float64)
        shard = whole.new_ones(-(-num_rows // num_ranks), num_columns)
        padded = whole.new_ones(num_ranks * len(shard), num_columns)
        # A layer is fetched twice, for forward and for backward.
        fetch = sent_in(collectives.broadcast, whole, owner, algorithm="direct")
        reduce = sent_in(collectives.reduce, whole, root=owner, algorithm="direct")
        owners.append((whole.nbytes if rank == owner else 0, 2 * fetch + reduce))
        fetch = sent_in(collectives.all_gather, padded, shard)
        reduce = sent_in(collectives.reduce_scatter, shard, padded)
        shards.append((shard.nbytes, 2 * fetch + reduce))
    return [owners, shards]
