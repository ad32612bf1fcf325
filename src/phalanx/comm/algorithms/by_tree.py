"""Binomial tree collectives: in each step of a broadcast the number of ranks with data doubles.

Each direction takes ceil(log2 P) steps, and a broadcast or reduce sends the full tensor in each; so
trees suit small tensors (Thakur, Rabenseifner, Gropp, Optimization of collective communication
operations in MPICH, 2005).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.comm.algorithms.steps import Move, Steps, dual, moves_of, steps_of


def broadcast(num_ranks: int, root: int) -> Steps:
    """Send the tensor to the rank half the tree away, then a quarter of the tree, and so on."""
    whole = range(num_ranks)
    return steps_of(
        "broadcast",
        (
            [Move((root + at) % num_ranks, (root + at + span) % num_ranks, whole) for at in senders]
            for span, senders in _spans(num_ranks)
        ),
    )


def reduce(num_ranks: int, root: int) -> Steps:
    """Reduce within pairs of ranks, then pairs of pairs, up to the root."""
    return dual(broadcast(num_ranks, root), "reduce", reduces=True)


def scatter(num_ranks: int, root: int) -> Steps:
    """Send the other half of the tree its chunks, then the other quarter, and so on."""
    return steps_of(
        "scatter",
        (
            [
                move
                for at in senders
                for move in moves_of(
                    (root + at) % num_ranks,
                    (root + at + span) % num_ranks,
                    [
                        (root + goal) % num_ranks
                        for goal in range(at + span, min(at + 2 * span, num_ranks))
                    ],
                )
            ]
            for span, senders in _spans(num_ranks)
        ),
    )


def gather(num_ranks: int, root: int) -> Steps:
    """Send the collected chunks of each subtree up to its parent, ending at the root."""
    return dual(scatter(num_ranks, root), "gather", reduces=False)


def all_reduce(num_ranks: int) -> Steps:
    """Reduce to rank 0, then broadcast."""
    return reduce(num_ranks, 0) + broadcast(num_ranks, 0)


def all_gather(num_ranks: int) -> Steps:
    """Gather on rank 0, then broadcast."""
    return gather(num_ranks, 0) + broadcast(num_ranks, 0)


def reduce_scatter(num_ranks: int) -> Steps:
    """Reduce to rank 0, then scatter."""
    return reduce(num_ranks, 0) + scatter(num_ranks, 0)


def _spans(num_ranks: int) -> Iterator[tuple[int, list[int]]]:
    """Yield for each step the distance of its sends, and the senders' distances from the root."""
    # Distances from the root, P = 6; a rank without a peer at the distance skips the step:
    #
    #   span 4    0 -> 4
    #   span 2    0 -> 2
    #   span 1    0 -> 1    2 -> 3    4 -> 5
    span = 1 << max(0, num_ranks - 1).bit_length() >> 1
    while span:
        yield span, [at for at in range(0, num_ranks, 2 * span) if at + span < num_ranks]
        span //= 2
