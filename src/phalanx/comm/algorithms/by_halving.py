"""Recursive halving and doubling: few steps, and no more bytes than a ring.

If P is a power of two, ranks r and r XOR d exchange halves of the tensor, then quarters, and so on
(halving); then each exchange doubles the part that a rank has (Thakur, Rabenseifner, Gropp 2005).
An all-reduce takes 2 log2 P steps, and each rank sends 2 (P-1)/P of the tensor. For any other P a
rank sends to r - d and receives from r + d, and the last step moves the rest: 2 ceil(log2 P) steps
with the same number of bytes (Bruck et al., Efficient algorithms for all-to-all communications,
1997; Traff, arXiv 2410.14234, 2024).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.comm.algorithms import by_tree
from phalanx.comm.algorithms.steps import Move, Steps, dual, moves_of, steps_of


def all_gather(num_ranks: int) -> Steps:
    """All-gather by doubling the number of chunks on each rank in every step."""
    spans = (1 << bit for bit in range((num_ranks - 1).bit_length()))
    return steps_of("all-gather", (_exchange(num_ranks, span) for span in spans))


def reduce_scatter(num_ranks: int) -> Steps:
    """Reduce-scatter by halving the number of chunks that each rank still reduces."""
    return dual(all_gather(num_ranks), "reduce-scatter", reduces=True)


def all_reduce(num_ranks: int) -> Steps:
    """Reduce-scatter by halving, then all-gather by doubling."""
    return reduce_scatter(num_ranks) + all_gather(num_ranks)


def broadcast(num_ranks: int, root: int) -> Steps:
    """Scatter by halving, then all-gather by doubling."""
    return by_tree.scatter(num_ranks, root) + all_gather(num_ranks)


def reduce(num_ranks: int, root: int) -> Steps:
    """Reduce-scatter by halving, then gather."""
    return reduce_scatter(num_ranks) + by_tree.gather(num_ranks, root)


def all_to_all(num_ranks: int) -> Steps:
    """Send each chunk by the powers of two that sum to its distance: ceil(log2 P) steps."""
    # A chunk that has to go 5 = 1 + 4 ranks moves in the step of span 1 and in the step of span 4.
    # Before the step of a span it has moved by the lower powers: distance % span.
    ranks, spans = range(num_ranks), (1 << bit for bit in range((num_ranks - 1).bit_length()))
    return steps_of(
        "all-to-all",
        (
            [
                Move(here, (here + span) % num_ranks, range(chunk, chunk + 1))
                for origin in ranks
                for distance in ranks
                if distance & span
                for here in [(origin + distance % span) % num_ranks]
                for chunk in [origin * num_ranks + (origin + distance) % num_ranks]
            ]
            for span in spans
        ),
    )


def _exchange(num_ranks: int, span: int) -> Iterator[Move]:
    # Chunks of rank 0 and of rank 1 after each step:
    #
    #   P = 4, with r XOR span                 P = 5, from r + span
    #   span 1    0 1        0 1               0 1          1 2
    #   span 2    0 1 2 3    0 1 2 3           0 1 2 3      1 2 3 4
    #   span 4                                 0 1 2 3 4    1 2 3 4 0
    #
    # With P = 5 the last step moves only the one chunk that each rank still lacks.
    for rank in range(num_ranks):
        if num_ranks & (num_ranks - 1) == 0:
            begin = rank // span * span
            yield Move(rank, rank ^ span, range(begin, begin + span))
        else:
            held = range(rank, rank + min(span, num_ranks - span))
            yield from moves_of(
                rank, (rank - span) % num_ranks, [chunk % num_ranks for chunk in held]
            )
