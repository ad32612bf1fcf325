"""Correct the times of ranks so that no message is received before it was sent.

Measured offsets of clocks are within an error of the true ones, so a receive may seem to end before
its send began. Corrections x are added to the times of a rank: values at equally spaced knots of
each step, and linear in between. They satisfy

    message a -> b            end + x_b >= begin + x_a, at both knots around each of the two times
    collective of a, b        the same in both directions: it ends nowhere before all have begun
    knots of a rank           t_(k+1) + x_(k+1) >= t_k + x_k: its time does not run backwards
    measured                  -error <= x <= error

These are difference constraints, which longest paths solve (Bellman and Ford; Cormen et al.,
Introduction to Algorithms, section 22.4). The result is the mean of the least and the greatest
solution: zero where messages say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from phalanx.measure.spans import StepSpans

Array = NDArray[Any]

MUTUAL: Final = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Collectives that end on no rank before all ranks have begun them.

An all-to-all may be a swap of pairs, so its ranks need not wait for all others.
"""

MARGIN_S: Final = 2e-9
"""Least time from the begin of a send to the end of its receive, more than times are rounded."""

PIECES: Final = (1, 8, 64)
"""Pieces into which knots divide a step; more are tried where messages contradict fewer."""


@dataclass(slots=True)
class Node:
    """The times of one step on one rank, in seconds of rank 0's clock.

    Attributes:
        head: the step, without spans.
        begin_s: begin of the step; `end_s` its end.
        error_s: largest error of the times.
        ids: an identifier of each collective, equal on the ranks of a collective or message.
        begins_s: begin of each collective; `ends_s` their ends.
        is_source: whether the other ranks cannot end a collective before this rank began it.
        is_target: whether this rank cannot end it before its sources began it.
        shifts_s: corrections at the knots.
    """

    head: StepSpans
    begin_s: float
    end_s: float
    error_s: float
    ids: Array
    begins_s: Array
    ends_s: Array
    is_source: Array
    is_target: Array
    shifts_s: Array

    def measured(self, own_s: Array) -> Array:
        """Return times of the rank's own clock as times of rank 0's clock, without corrections."""
        rate = (self.end_s - self.begin_s) / (self.head.end_s - self.head.begin_s)
        return (own_s - self.head.begin_s) * rate + self.begin_s

    def corrected(self, times_s: Array) -> Array:
        """Return times with their corrections."""
        knots_s = np.linspace(self.begin_s, self.end_s, len(self.shifts_s))
        return times_s + np.interp(times_s, knots_s, self.shifts_s)


def correct(nodes: Sequence[Node]) -> int:
    """Set `shifts_s` of nodes, which are in the order of steps; return how many ranks contradict.

    Ranks contradict where the constraints need a correction that is larger than the error, as where
    a clock did not run evenly.
    """
    ids, begins_s, ends_s, is_source, is_target = (
        np.concatenate([getattr(node, name) for node in nodes])
        for name in ("ids", "begins_s", "ends_s", "is_source", "is_target")
    )
    node_of = np.repeat(np.arange(len(nodes)), [len(node.ids) for node in nodes])
    first_s, last_s, errors_s = (
        np.array([getattr(node, name) for node in nodes])
        for name in ("begin_s", "end_s", "error_s")
    )
    order = np.argsort(ids, kind="stable")
    ranks, wrong = np.array([node.head.rank for node in nodes]), list[int]()
    for pieces in PIECES:
        num_knots = pieces + 1
        # Constraints x[v] >= x[u] + w on the knots of all nodes, one node after another.
        edges: list[tuple[int, int, float]] = []
        knot_of: dict[int, int] = {}  # rank -> last knot of its step before
        for number, node in enumerate(nodes):
            first = number * num_knots
            piece_s = (node.end_s - node.begin_s) / pieces
            edges += [(k, k + 1, -piece_s) for k in range(first, first + pieces)]
            if (before := knot_of.get(node.head.rank)) is not None:
                edges.append((before, first, nodes[before // num_knots].end_s - node.begin_s))
            knot_of[node.head.rank] = first + pieces
        table = [np.array(edges).T]
        shares = (np.stack([begins_s, ends_s]) - first_s[node_of]) / (last_s - first_s)[node_of]
        knots = np.clip(shares * pieces, 0, pieces - 1).astype(int) + node_of * num_knots
        for shift in range(1, len(order)):
            # Sorted by id, calls of one id are neighbors: each meets all others of its id.
            one, other = order[:-shift], order[shift:]
            is_one_call = ids[one] == ids[other]
            if not is_one_call.any():
                break
            for a, b in ((one, other), (other, one)):
                w = begins_s[a] - ends_s[b] + MARGIN_S
                may_bind = w > -2 * (errors_s[node_of[a]] + errors_s[node_of[b]])
                pair = is_one_call & is_source[a] & is_target[b] & may_bind
                ends = np.stack([knots[0, a[pair]], knots[1, b[pair]]])
                (u, v), inverse = np.unique(ends, axis=1, return_inverse=True)
                strongest = np.full(len(u), -np.inf)
                np.maximum.at(strongest, inverse.reshape(-1), w[pair])
                table += [np.stack([u + i, v + j, strongest]) for i in (0, 1) for j in (0, 1)]
        u, v, w = np.concatenate(table, axis=1)
        u, v = u.astype(int), v.astype(int)
        bounds_s = np.repeat(errors_s, num_knots)
        x = (_least(-bounds_s, u, v, w) - _least(-bounds_s, v, u, w)) / 2
        for node, shifts_s in zip(nodes, x.reshape(-1, num_knots), strict=True):
            node.shifts_s = shifts_s
        beyond = np.flatnonzero(abs(x) > bounds_s + MARGIN_S)
        broken = np.append(v[x[v] < x[u] + w - MARGIN_S / 2], beyond) // num_knots
        wrong = np.unique(ranks[broken]).tolist()
        if not wrong:
            break
    return len(wrong)


def _least(start: Array, u: Array, v: Array, w: Array) -> Array:
    """Return the least x >= start with x[v] >= x[u] + w, or close to it if there is none."""
    x = start.copy()
    for _ in x:
        before = x.copy()
        np.maximum.at(x, v, x[u] + w)
        if np.array_equal(before, x):
            break
    return x
