"""Collectives by their algorithms: chunks that each rank has, sends and adds in each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import collectives
from phalanx.collectives import DEFAULT
from phalanx.comm.algorithms.catalogue import ROOTED, list_steps
from phalanx.comm.algorithms.running import AllToAllChunks, Collective, FlatChunks
from phalanx.comm.algorithms.steps import Move, Steps
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.report.tabular import Table
from phalanx.show.shown import Frame, MessageSent, Shown, ShowRun, Strip

HEADS: Final = ("rank", "messages sent", "bytes sent")

NOTHING: Final = -1
"""Value of a chunk that a rank has not received."""

ITEM_BYTES: Final = 8
"""Bytes of a chunk: one int64."""


@dataclass(frozen=True, kw_only=True)
class ShowCollective(ShowRun):
    """Run a collective on processes of this host, and print who sends which chunk in each step."""

    algorithm: str | None = None
    """ring, tree, halving-doubling, direct, or hierarchical/RANKS with RANKS on each host."""
    root: Annotated[int, Range(0)] = 0
    """Rank that a broadcast or a scatter starts at, and a reduce or a gather ends at."""


class TorchCall(NamedTuple):
    """Description of a collective.

    Attributes:
        in_torch: equivalent call of torch.distributed.
        passes: sentence on the arguments that the ranks pass.
    """

    in_torch: str
    passes: str


CALLS: Final = {
    "broadcast": TorchCall(
        "dist.broadcast(tensor, src=ROOT)",
        "the root passes its tensor, the others a tensor of the same size to overwrite",
    ),
    "reduce": TorchCall(
        "dist.reduce(tensor, dst=ROOT, op=dist.ReduceOp.SUM)",
        "every rank passes its tensor; afterwards the root's contains the sum, and the others' "
        "contents are undefined",
    ),
    "scatter": TorchCall(
        "dist.scatter(tensor, list_of_chunks if rank == ROOT else None, src=ROOT)",
        "the root passes a chunk for each rank, the others None; every rank passes an output for "
        "one chunk",
    ),
    "gather": TorchCall(
        "dist.gather(tensor, list_of_chunks if rank == ROOT else None, dst=ROOT)",
        "every rank passes its chunk, the root a list of outputs for all chunks, the others None",
    ),
    "all-gather": TorchCall(
        "dist.all_gather(list_of_chunks, chunk)",
        "every rank passes its chunk, and a list of outputs for all chunks",
    ),
    "reduce-scatter": TorchCall(
        "dist.reduce_scatter(chunk, list_of_chunks, op=dist.ReduceOp.SUM)",
        "every rank passes its tensor, and an output for its chunk of the sum",
    ),
    "all-reduce": TorchCall(
        "dist.all_reduce(tensor, op=dist.ReduceOp.SUM)",
        "every rank passes its tensor, which the sum overwrites",
    ),
    "all-to-all": TorchCall(
        "dist.all_to_all_single(output, given)",
        "every rank passes a chunk for each rank, and an output for one chunk from each",
    ),
    "barrier": TorchCall(
        "dist.barrier()", "no rank passes a tensor; one byte of each rank signals its arrival"
    ),
}


def show_collective(collective: str, algorithm: str, config: ShowCollective) -> Shown:
    """Run a collective by an algorithm, which `config.algorithm` overrides if it is set.

    Raises:
        ConfigError: the algorithm does not implement the collective, or `root` is invalid for it.
    """
    algorithm = config.algorithm or algorithm or DEFAULT[collective]
    if algorithm == "hierarchical":
        algorithm = f"hierarchical/{max(1, config.ranks // 2)}"
    if (root := config.root) and collective not in ROOTED:
        raise ConfigError(f"root is {root}, but {collective} has no root; leave it out")
    if root >= config.ranks:
        raise ConfigError(
            f"root is {root}, and the ranks are 0 to {config.ranks - 1}; the nearest is "
            f"{config.ranks - 1}"
        )
    steps = list_steps(collective, algorithm, config.ranks, root)
    ranks = run_ranks(walk, config.ranks, collective, algorithm, root, threads=1)
    frames = [Frame("before", [cells[0] for cells, *_ in ranks])]
    sizes, done = Counter(step.part for step in steps), Counter[str]()
    for number, step in enumerate(steps, 1):
        done[step.part] += 1
        does = "adds" if step.moves[0].is_reduced else "keeps"
        title = f"step {number} of {len(steps)}: {step.part} {done[step.part]} of "
        title += f"{sizes[step.part]}, the receiver {does}"
        sent = [message_of(move, collective, config.ranks) for move in step.moves]
        frames.append(Frame(title, [cells[number] for cells, *_ in ranks], sent))
    each = ", ".join(f"{number} of the {part}" for part, number in sizes.items())
    parts: list[Strip | Table | str] = [
        Strip("", [f"{'from' if collective == 'all-to-all' else 'chunk'} {chunk}"
                   for chunk in range(config.ranks)], frames),
        Table("counted by the ledger during the run", HEADS,
             [(str(rank), str(num), str(size)) for rank, (_, num, size, _) in enumerate(ranks)],
             HEADS),
        f"{len(steps)} steps: {each}." if len(sizes) > 1 else f"{len(steps)} steps.",
    ]  # fmt: skip
    call = CALLS[collective]
    if collective != "barrier":
        name = call.in_torch.partition("(")[0].replace("dist.", "torch.distributed.")
        wrong = [rank for rank, (*_, is_same) in enumerate(ranks) if not is_same]
        parts.append(
            f"{name} gave a different result on rank {wrong[0]}: a bug in Phalanx." if wrong else
            f"{name} gave the same on every rank."
        )  # fmt: skip
    passes = f"{call.passes[0].upper()}{call.passes[1:]}."
    if collective in ROOTED:
        passes = f"Rank {root} is the root: {call.passes}."
    return Shown(
        f"{collective} by {algorithm}, {config.ranks} ranks",
        [passes, values_text(collective, steps, config.ranks)],
        parts,
        call.in_torch.replace("ROOT", str(root)),
    )


def values_text(collective: str, steps: Steps, num_ranks: int) -> str:
    """Return a sentence on how to read the values."""
    if collective == "all-to-all":
        return "Value 12 goes from rank 1 to rank 2."
    if collective == "barrier":
        return "A rank that has chunk r has received the signal of rank r."
    if any(move.is_reduced for step in steps for move in step.moves):
        example = f", so {'1' * num_ranks} is a sum of ranks 0 to {num_ranks - 1}"
    else:
        example = ""
    return (
        f"The digit of rank r is r places from the right{example}; in chunk c each digit is c + 1."
    )


def message_of(move: Move, collective: str, num_ranks: int) -> MessageSent:
    """Return the message of a move: the names of its chunks, and its bytes."""
    first, last = move.chunks[0], move.chunks[-1]
    what = f"chunk {first}" if first == last else f"chunks {first}-{last}"
    if collective == "all-to-all":
        what = f"{first // num_ranks}{first % num_ranks}"
    item_bytes = 1 if collective == "barrier" else ITEM_BYTES
    return MessageSent(move.source, move.target, what, len(move.chunks) * item_bytes)


def walk(collective: str, algorithm: str, root: int) -> tuple[list[list[str]], int, int, bool]:
    """Run a collective on this rank.

    Returns:
        The chunks of this rank before the first step and after each step, the messages and bytes
        that the ledger counted, and whether torch.distributed gave the same result.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    collectives.barrier()  # connects the ranks
    values = given_to(collective, rank, num_ranks, root)
    output = torch.full_like(values, NOTHING)
    if collective == "all-to-all":
        held: Any = AllToAllChunks(values.view(-1, 1), output.view(-1, 1), rank)
    else:
        held = FlatChunks(output.copy_(values), num_ranks)
    steps = list_steps(collective, algorithm, num_ranks, root)
    comm = Ranks({"dp": num_ranks})
    cells = [_cells(output)]
    with Ledger(comm) as ledger:
        call = f"{collective} by {algorithm}"
        work = Collective(call, steps, held, comm.mesh.get_group("dp")).begin()
        cells += [_cells(output) for _ in work.remaining()]
        work.wait()
    entries = ledger.entries()
    num_messages, num_bytes = sum(e.calls for e in entries), sum(e.sent_bytes for e in entries)
    same = torch.equal(*result_of_torch(collective, values, output, root))
    return cells, num_messages, int(num_bytes), same


def given_to(collective: str, rank: int, num_ranks: int, root: int) -> Tensor:
    """Return the values of a rank before the first step."""
    counts = torch.arange(num_ranks, device="cpu")
    if collective == "all-to-all":
        return 10 * rank + counts
    values = (1 + counts) * 10**rank
    if collective == "barrier":
        values = torch.ones_like(counts, dtype=torch.int8)
    if collective in ("all-gather", "gather", "barrier"):
        values[counts != rank] = NOTHING
    if collective in ("broadcast", "scatter") and rank != root:
        values.fill_(NOTHING)
    return values


def result_of_torch(
    collective: str, values: Tensor, output: Tensor, root: int
) -> tuple[Tensor, Tensor]:
    """Return (result of torch.distributed, our result) on this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole, chunk, is_root = values.clone(), values[rank : rank + 1].clone(), rank == root
    mine = output[rank : rank + 1]
    if collective == "broadcast":
        dist.broadcast(whole, root)
    elif collective == "reduce":
        dist.reduce(whole, root)
        return (whole, output) if is_root else (mine, mine)
    elif collective == "all-reduce":
        dist.all_reduce(whole)
    elif collective == "scatter":
        dist.scatter(chunk, list(whole.split(1)) if is_root else None, root)
        return chunk, mine
    elif collective == "gather":
        pieces = list(whole.split(1)) if is_root else None
        dist.gather(chunk, pieces, root)
        return (torch.cat(pieces), output) if pieces is not None else (mine, mine)
    elif collective == "all-gather":
        dist.all_gather(list(whole.split(1)), chunk)
    elif collective == "reduce-scatter":
        dist.reduce_scatter(chunk, list(whole.split(1)))
        return chunk, mine
    elif collective == "all-to-all":
        dist.all_to_all_single(whole, values, [1] * num_ranks, [1] * num_ranks)
    return whole, output


def _cells(held: Tensor) -> list[str]:
    return ["." if value == NOTHING else str(value) for value in held.tolist()]
