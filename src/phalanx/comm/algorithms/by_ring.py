"""Collectives round a ring: a rank sends to the next one alone, and receives from the one before.

Each link carries one chunk a step, so a rank sends 2 (P-1)/P of the tensor for an all-reduce, the
least that there is (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009), in
2 (P-1) steps: P - 1 of the reduce-scatter, and P - 1 of the all-gather.
"""

from __future__ import annotations

from phalanx.comm.algorithms.steps import Move, Steps, backward, moves_of, steps_of


def all_gather(num_ranks: int, way: int = 1) -> Steps:
    """Hand on what came in the step before; `way` is 1, or -1 for the other way round."""
    ranks = range(num_ranks)
    return steps_of(
        "all-gather",
        (
            [
                move
                for rank in ranks
                for move in moves_of(
                    rank, (rank + way) % num_ranks, [(rank - way * step) % num_ranks]
                )
            ]
            for step in range(num_ranks - 1)
        ),
    )


def reduce_scatter(num_ranks: int) -> Steps:
    """Reduce what comes into the own chunk, and hand it on; chunk r ends on rank r."""
    return backward(all_gather(num_ranks, way=-1), "reduce-scatter", reduces=True)


def all_reduce(num_ranks: int) -> Steps:
    """Reduce-scatter, then all-gather."""
    return reduce_scatter(num_ranks) + all_gather(num_ranks)


def broadcast(num_ranks: int, root: int) -> Steps:
    """Hand the chunks on one after the other, so that all links are busy at once."""
    chain = [(root + distance) % num_ranks for distance in range(num_ranks)]
    return steps_of(
        "broadcast",
        (
            [
                Move(chain[at], chain[at + 1], range(step - at, step - at + 1))
                for at in range(num_ranks - 1)
                if 0 <= step - at < num_ranks
            ]
            for step in range(2 * num_ranks - 2)
        ),
    )


def reduce(num_ranks: int, root: int) -> Steps:
    """Collect the chunks one after the other."""
    return backward(broadcast(num_ranks, root), "reduce", reduces=True)


def scatter(num_ranks: int, root: int) -> Steps:
    """Send the chunk with the longest way first; the others hand it on."""
    chain = [(root + distance) % num_ranks for distance in range(num_ranks)]
    last = num_ranks - 1
    return steps_of(
        "scatter",
        (
            [
                move
                for at in range(step + 1)
                for move in moves_of(chain[at], chain[at + 1], [chain[last + at - step]])
            ]
            for step in range(last)
        ),
    )


def gather(num_ranks: int, root: int) -> Steps:
    """Collect chunks, the nearest first."""
    return backward(scatter(num_ranks, root), "gather", reduces=False)


def all_to_all(num_ranks: int) -> Steps:
    """Hand on all that is not for the rank itself."""
    ranks = range(num_ranks)
    return steps_of(
        "all-to-all",
        (
            [
                Move(rank, (rank + 1) % num_ranks, range(chunk, chunk + 1))
                for rank in ranks
                for origin in [(rank - step) % num_ranks]
                for goal in ranks
                for chunk in [origin * num_ranks + goal]
                if (goal - origin) % num_ranks > step
            ]
            for step in range(num_ranks - 1)
        ),
    )
