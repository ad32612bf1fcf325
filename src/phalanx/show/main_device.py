"""Data parallelism with a main device, as in torch.nn.DataParallel, and without one.

A step with a main device, rank 0, on rows that are split over all ranks:

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import collectives
from phalanx.collectives import How
from phalanx.comm.algorithms.catalogue import list_steps
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.launch.local import run_ranks
from phalanx.show.shown import Grid, Shown, ShowRun

ROWS_OF_RANK: Final = 4
WIDTHS: Final = (16, 32, 8)
"""Numbers of input, hidden and output features."""


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


def show_data_parallel(config: ShowRun) -> Shown:
    """Run both kinds of step on ranks, and compare their gradients with one process."""
    num_ranks = config.ranks
    with_main = run_ranks(step_with_main_device, num_ranks, threads=1)
    without = run_ranks(step_without, num_ranks, threads=1)
    alone = gradients_of_all_rows(num_ranks)
    parts = [
        *compared("with a main device", [calls for calls, _ in with_main], "direct"),
        difference("The gradients of the main device", with_main[0][1], alone),
        *compared("without", [calls for calls, _ in without], "ring"),
        difference("The gradients of every rank", without[-1][1], alone),
        f"In each step the main device sends and receives {num_ranks - 1} times the weights, and "
        "stores the outputs of the whole batch; in an all-reduce each rank sends less than 2 times "
        "the weights, for any number of ranks.",
    ]
    return Shown(
        f"data parallelism with a main device and without, {num_ranks} ranks",
        ["Every rank computes different rows of one batch with the same weights."],
        parts,
        "torch.nn.DataParallel(model) has a main device; DistributedDataParallel(model) has none",
    )


def compared(title: str, found: Sequence[Sequence[CallMade]], algorithm: str) -> list[Grid]:
    """Return tables of the collectives of a step, and of the bytes of each rank."""
    num_ranks = len(found)
    rows = [
        [str(call.number), call.collective, call.what, f"{call.num_bytes:,}"] for call in found[0]
    ]
    heads = ["step", "collective", "what", "bytes"]
    totals = list[list[str]]()
    for rank in range(num_ranks):
        sent = sum(call.sent for call in found[rank])
        received = sum(received_bytes(call, algorithm, num_ranks, rank) for call in found[0])
        totals.append([str(rank), f"{sent:,}", f"{received:,}"])
    of_ranks = ["rank", "sent, counted", "received, from the steps"]
    return [
        Grid(title, heads, rows, ["bytes"]),
        Grid("", of_ranks, totals, of_ranks),
    ]


def received_bytes(call: CallMade, algorithm: str, num_ranks: int, rank: int) -> int:
    """Return the bytes that a rank receives in a collective, from the steps of its algorithm."""
    steps = list_steps(call.collective, algorithm, num_ranks)
    chunks = sum(len(m.chunks) for step in steps for m in step.moves if m.target == rank)
    return chunks * call.num_bytes // num_ranks


def difference(whose: str, found: Sequence[Tensor], alone: Sequence[Tensor]) -> str:
    """Return a sentence on the difference of gradients from the gradients of one process."""
    gap = max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True))
    return f"{whose} differ from one process's by {gap:.1e} at most, in float64."


class Calls:
    """Runs collectives, and records the bytes that each sent, as the ledger counts them."""

    def __init__(self) -> None:
        self.made: list[CallMade] = []
        self._comm = Ranks({"dp": dist.get_world_size()})
        collectives.barrier()  # connects the ranks

    def __call__(self, number: int, what: str, whole: Tensor, call: Callable[[], object]) -> None:
        """Run `call`, a call of phalanx.collectives, and record its bytes."""
        with Ledger(self._comm) as ledger:
            call()
        sent = sum(entry.sent_bytes for entry in ledger.entries())
        name, _, of = what.partition(" ")
        self.made.append(CallMade(number, name, of, whole.nbytes, int(sent)))


def step_with_main_device() -> tuple[list[CallMade], list[Tensor]]:
    """Run the step listed above; return its collectives, and the gradients on rank 0."""
    rank, num_ranks, calls = dist.get_rank(), dist.get_world_size(), Calls()
    model, (x, y) = make_model(), batch(num_ranks)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    if rank:
        weights.zero_()
    how: How = {"algorithm": "direct"}
    calls(1, "broadcast the weights", weights, lambda: collectives.broadcast(weights, **how))
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    rows = torch.empty_like(x[:ROWS_OF_RANK])
    calls(2, "scatter the rows", x, lambda: collectives.scatter(rows, x, **how))
    output = model(rows)
    whole = torch.empty(len(x), WIDTHS[-1], dtype=x.dtype)
    calls(4, "gather the outputs", whole, lambda: collectives.gather(whole, output.detach(), **how))
    d_whole = whole.requires_grad_()
    if rank == 0:
        F.mse_loss(d_whole, y).backward()
    given = torch.zeros_like(whole) if d_whole.grad is None else d_whole.grad
    d_output = torch.empty_like(output)
    calls(6, "scatter the gradients of the outputs", given,
          lambda: collectives.scatter(d_output, given, **how))  # fmt: skip
    output.backward(d_output)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients(model)])
    calls(8, "reduce the gradients", flat, lambda: collectives.reduce(flat, **how))
    return calls.made, _like(flat, model)


def step_without() -> tuple[list[CallMade], list[Tensor]]:
    """Run the step without a main device; return its collectives and gradients."""
    rank, num_ranks, calls = dist.get_rank(), dist.get_world_size(), Calls()
    model = make_model()
    x, y = (whole.chunk(num_ranks)[rank] for whole in batch(num_ranks))
    (F.mse_loss(model(x), y) / num_ranks).backward()
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients(model)])
    size, padding = flat.numel(), -flat.numel() % num_ranks
    flat = F.pad(flat, (0, padding))
    calls(2, "all-reduce the gradients", flat, lambda: collectives.all_reduce(flat))
    return calls.made, _like(flat[:size], model)


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


def gradients_of_all_rows(num_ranks: int) -> list[Tensor]:
    """Return the gradients that one process computes for the global batch."""
    model, (x, y) = make_model(), batch(num_ranks)
    F.mse_loss(model(x), y).backward()
    return gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def _like(flat: Tensor, model: nn.Module) -> list[Tensor]:
    sizes = [p.numel() for p in model.parameters()]
    parts = zip(flat.split(sizes), model.parameters(), strict=True)
    return [part.view_as(parameter) for part, parameter in parts]
