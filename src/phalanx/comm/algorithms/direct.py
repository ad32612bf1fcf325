"""Direct collectives: each rank sends to all other ranks at once, in one step per direction.

A rank sends P - 1 messages per step, which suits small jobs and fully connected ranks. If the
tensor is cut into chunks, a rank sends no more bytes than in a ring; the root of a broadcast sends
P - 1 times the tensor.
"""

from __future__ import annotations

from phalanx.comm.algorithms.steps import Move, Steps, dual, moves_of, steps_of


def broadcast(num_ranks: int, root: int) -> Steps:
    """Send the tensor to every other rank."""
    whole = range(num_ranks)
    return steps_of("broadcast", [[Move(root, rank, whole) for rank in whole if rank != root]])


def reduce(num_ranks: int, root: int) -> Steps:
    """Send the tensor to the root, which reduces the tensors one at a time."""
    return dual(broadcast(num_ranks, root), "reduce", reduces=True)


def scatter(num_ranks: int, root: int) -> Steps:
    """Send every other rank its chunk."""
    others = (rank for rank in range(num_ranks) if rank != root)
    return steps_of("scatter", [[Move(root, rank, range(rank, rank + 1)) for rank in others]])


def gather(num_ranks: int, root: int) -> Steps:
    """Send this rank's chunk to the root."""
    return dual(scatter(num_ranks, root), "gather", reduces=False)


def all_gather(num_ranks: int) -> Steps:
    """Send this rank's chunk to every other rank."""
    ranks = range(num_ranks)
    pairs = ((rank, other) for rank in ranks for other in ranks if other != rank)
    return steps_of(
        "all-gather", [[Move(rank, other, range(rank, rank + 1)) for rank, other in pairs]]
    )


def reduce_scatter(num_ranks: int) -> Steps:
    """Send every other rank its chunk; the receiver reduces the chunks one at a time."""
    return dual(all_gather(num_ranks), "reduce-scatter", reduces=True)


def all_reduce(num_ranks: int) -> Steps:
    """Reduce-scatter, then all-gather."""
    return reduce_scatter(num_ranks) + all_gather(num_ranks)


def all_to_all(num_ranks: int) -> Steps:
    """Send every other rank its chunk."""
    ranks = range(num_ranks)
    pairs = ((rank, other) for rank in ranks for other in ranks if other != rank)
    return steps_of(
        "all-to-all",
        [[move for r, s in pairs for move in moves_of(r, s, [r * num_ranks + s])]],
    )
