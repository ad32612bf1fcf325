"""Ring collectives: each rank sends only to the next rank and receives only from the previous one.

Each link carries one chunk per step, so in an all-reduce a rank sends 2 (P-1)/P of the tensor, the
minimum (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009), in 2 (P-1) steps: P - 1
for the reduce-scatter and P - 1 for the all-gather.
"""

from __future__ import annotations

from phalanx.comm.algorithms.steps import Move, Steps, dual, moves_of, steps_of


def all_gather(num_ranks: int, way: int = 1) -> Steps:
    """Send the rank's chunk, then forward received ones; `way` is 1, or -1 to reverse the ring."""
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
    """Reduce each received chunk into the local one, and forward it; chunk r ends on rank r."""
    # Chunk c visits the ranks c + 1, c + 2, ..., c, and each adds its own term. For P = 3:
    #
    #   step 1    0 --2--> 1    1 --0--> 2    2 --1--> 0
    #   step 2    0 --1--> 1    1 --2--> 2    2 --0--> 0
    #
    # So each chunk has its own order of terms, and it is the same order in every run.
    return dual(all_gather(num_ranks, way=-1), "reduce-scatter", reduces=True)


def all_reduce(num_ranks: int) -> Steps:
    """Reduce-scatter, then all-gather."""
    return reduce_scatter(num_ranks) + all_gather(num_ranks)


def broadcast(num_ranks: int, root: int) -> Steps:
    """Pipeline the chunks along the ring from the root, so that all links are busy at once."""
    # Chunks on each link; the numbers of ranks are distances from the root, and P = 3:
    #
    #   step       1   2   3   4
    #   0 -> 1     0   1   2
    #   1 -> 2         0   1   2
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
    """Pipeline the chunks along the ring toward the root, and reduce them on every rank."""
    return dual(broadcast(num_ranks, root), "reduce", reduces=True)


def scatter(num_ranks: int, root: int) -> Steps:
    """Send the chunk of the farthest rank first; ranks between forward it."""
    chain = [(root + distance) % num_ranks for distance in range(num_ranks)]
    # All chunks arrive in the last step. Distances from the root, P = 4:
    #
    #   step       1   2   3
    #   0 -> 1     3   2   1
    #   1 -> 2         3   2
    #   2 -> 3             3
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
    """Forward chunks toward the root; the nearest rank's chunk arrives first."""
    return dual(scatter(num_ranks, root), "gather", reduces=False)


def all_to_all(num_ranks: int) -> Steps:
    """Forward every received chunk that is not for the rank itself."""
    # In step s each rank forwards the P - 1 - s chunks of rank r - s that go farther (s from 0), so
    # a rank sends P (P - 1)/2 chunks: half the distance on average, times the P - 1 chunks.
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
