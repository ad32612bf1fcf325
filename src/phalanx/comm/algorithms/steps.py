"""The steps of a collective as data: sender, receiver, chunks and reduction of each message.

A tensor is cut into P chunks, one for each of P ranks; an all-to-all has P x P chunks, and chunk
r P + s goes from rank r to rank s. All messages of a step run concurrently, and a rank sends the
values that it had when the step started. The same list is run (running.py), counted, and printed.

    all-gather by a ring of 3        step 1         step 2
    rank 0 holds chunk 0             0 --0--> 1     0 --2--> 1
    rank 1 holds chunk 1             1 --1--> 2     1 --0--> 2
    rank 2 holds chunk 2             2 --2--> 0     2 --1--> 0

[Note: Backward] A broadcast sends a tensor down a tree of ranks. The reversed list, with senders
and receivers exchanged, collects along the same tree: it is a reduce if receivers add. So if every
rank receives each chunk at most once, the reversed list is the dual collective: of a broadcast the
reduce, of a scatter the gather, of an all-gather the reduce-scatter (Chan et al., Collective
communication, 2007, section 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """One message of a step.

    Attributes:
        source: rank that sends.
        target: rank that receives.
        chunks: consecutive chunks, sent as one message.
        is_reduced: whether the receiver reduces the chunks into its own; else it copies them.
    """

    source: int
    target: int
    chunks: range
    is_reduced: bool = False


class CollectiveStep(NamedTuple):
    """Messages that run concurrently; `part` is the part of the algorithm, such as "all-gather"."""

    part: str
    moves: tuple[Move, ...]


Steps = tuple[CollectiveStep, ...]


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Split numbers into maximal runs of consecutive numbers."""
    runs = list[range]()
    for number in sorted(numbers):
        begin = runs.pop().start if runs and runs[-1].stop == number else number
        runs.append(range(begin, number + 1))
    return runs


def moves_of(source: int, target: int, chunks: Iterable[int]) -> list[Move]:
    """Return one move from `source` to `target` for each run of consecutive chunks."""
    return [Move(source, target, run) for run in runs_of(chunks)]


def steps_of(part: str, moves: Iterable[Iterable[Move]]) -> Steps:
    """Return a step of `part` for each list of moves, without empty steps."""
    listed = (CollectiveStep(part, tuple(each)) for each in moves)
    return tuple(step for step in listed if step.moves)


def dual(steps: Steps, part: str, *, reduces: bool) -> Steps:
    """Return the dual of a list, see [Note: Backward]; receivers reduce if `reduces`."""
    return steps_of(
        part,
        (
            [Move(target, source, chunks, reduces) for source, target, chunks, _ in step.moves]
            for step in reversed(steps)
        ),
    )


def cut(size: int, num_parts: int) -> list[range]:
    """Cut range(size) into consecutive ranges of nearly equal size; some may be empty."""
    bounds = [size * part // num_parts for part in range(num_parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def remap(steps: Steps, ranks: Sequence[int], chunks: Sequence[range]) -> Steps:
    """Map the ranks 0, 1, ... of a list to `ranks`, and its chunks 0, 1, ... to `chunks`."""
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
    """Merge lists with disjoint ranks, so that their steps run concurrently."""
    merged = list[CollectiveStep]()
    for several in itertools.zip_longest(*lists):
        present = [step for step in several if step is not None]
        moves = tuple(move for step in present for move in step.moves)
        merged.append(CollectiveStep(present[0].part, moves))
    return tuple(merged)
