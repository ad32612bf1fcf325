"""The steps of a collective as data: who sends which chunks to whom, and what the receiver does.

A rank has a tensor in P chunks, one for each of P ranks; an all-to-all has P x P, of which chunk
r P + s goes from rank r to rank s. All messages of a step run side by side, and a rank sends what
it held when the step began. The same list is run (running.py), counted, and printed.

    all-gather by a ring of 3        step 1         step 2
    rank 0 holds chunk 0             0 --0--> 1     0 --2--> 1
    rank 1 holds chunk 1             1 --1--> 2     1 --0--> 2
    rank 2 holds chunk 2             2 --2--> 0     2 --1--> 0

[Note: Backward] A broadcast hands a tensor down a tree of ranks. Read from its end, each receiver a
sender, it collects along the same tree: a reduce, if receivers add. So a list in which every rank
receives each chunk once at most also gives its counterpart: a broadcast the reduce, a scatter the
gather, an all-gather the reduce-scatter (Chan et al., Collective communication, 2007, section 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """One message of a step.

    Attributes:
        chunks: consecutive ones, sent as one message.
        is_reduced: whether the receiver reduces them into its own; else it keeps them as they are.
    """

    source: int
    target: int
    chunks: range
    is_reduced: bool = False


class CollectiveStep(NamedTuple):
    """Messages that run side by side; `part` names the half of the algorithm that they are of."""

    part: str
    moves: tuple[Move, ...]


Steps = tuple[CollectiveStep, ...]


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Return the runs of consecutive numbers."""
    runs = list[range]()
    for number in sorted(numbers):
        begin = runs.pop().start if runs and runs[-1].stop == number else number
        runs.append(range(begin, number + 1))
    return runs


def moves_of(source: int, target: int, chunks: Iterable[int]) -> list[Move]:
    """Return a move for each run of consecutive chunks."""
    return [Move(source, target, run) for run in runs_of(chunks)]


def steps_of(part: str, moves: Iterable[Iterable[Move]]) -> Steps:
    """Return steps of one part, without those in which nothing moves."""
    listed = (CollectiveStep(part, tuple(each)) for each in moves)
    return tuple(step for step in listed if step.moves)


def backward(steps: Steps, part: str, *, reduces: bool) -> Steps:
    """Return the counterpart of a list, see [Note: Backward]; receivers reduce if it `reduces`."""
    return steps_of(
        part,
        (
            [Move(target, source, chunks, reduces) for source, target, chunks, _ in step.moves]
            for step in reversed(steps)
        ),
    )


def cut(size: int, num_parts: int) -> list[range]:
    """Return consecutive ranges of nearly one size, some perhaps empty."""
    bounds = [size * part // num_parts for part in range(num_parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def among(steps: Steps, ranks: Sequence[int], chunks: Sequence[range]) -> Steps:
    """Return the list of ranks 0, 1, ... and their chunks as one of `ranks` and their `chunks`."""
    return tuple(
        CollectiveStep(
            part,
            tuple(
                Move(
                    ranks[source],
                    ranks[target],
                    range(chunks[moved[0]].start, chunks[moved[-1]].stop),
                    is_reduced,
                )
                for source, target, moved, is_reduced in moves
            ),
        )
        for part, moves in steps
    )


def side_by_side(lists: Iterable[Steps]) -> Steps:
    """Return one list of several whose ranks are all different."""
    merged = list[CollectiveStep]()
    for several in itertools.zip_longest(*lists):
        present = [step for step in several if step is not None]
        moves = tuple(move for step in present for move in step.moves)
        merged.append(CollectiveStep(present[0].part, moves))
    return tuple(merged)
