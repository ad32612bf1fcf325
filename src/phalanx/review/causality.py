"""The times of all ranks on the clock of rank 0, so that no message is received before it was sent.

A time t of a rank's own clock is the time t + x of rank 0's clock. Known of x, at the
begin and the end of each step and each collective of a rank:

    comparisons               lowest <= x <= highest, see measure.clock
    drift                     x changes by less than DRIFT a second
    message a -> b            end + x_b > begin + x_a
    collective of a, b        the same in both directions: it ends nowhere before all have begun

The least and the greatest x with which all this holds are found by passing bounds on, from message
to message and along each rank (difference constraints: Cormen et al., Introduction to Algorithms,
section 22.4). The true x lies between both, so their mean is taken, for which all this holds too,
and half of their distance is its largest error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from phalanx.measure.clock import DRIFT, WANDER, Array, Comparison, offset
from phalanx.measure.spans import StepSpans

MUTUAL: Final = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Collectives that end on no rank before all ranks have begun them.

An all-to-all may be a swap of pairs, so its ranks need not wait for all others.
"""

MARGIN_S: Final = 2e-9
"""Least time from the begin of a send to the end of its receive, more than times are rounded."""

MOST_PASSES: Final = 1000
"""Passes after which bounds that contradict one another are left as they are."""


@dataclass(slots=True)
class Node:
    """The step, and then each collective, of one step on one rank.

    Attributes:
        head: the step, without spans.
        own_s: begins and ends by the rank's own clock, [1 + collectives, 2].
        calls: numbers, equal on the ranks of a collective or message; -1 for the step.
        is_source: whether other ranks cannot end the collective before this rank began it.
        is_target: whether this rank cannot end it before its sources began it.
        rank0_s: `own_s` by the clock of rank 0, seconds after the first of all ranks.
        error_s: largest error of the times of this step.
        roles: "s" where an arrow starts, "f" where it finishes, or "".
    """

    head: StepSpans
    own_s: Array
    calls: Array
    is_source: Array
    is_target: Array
    rank0_s: Array = field(init=False)
    error_s: float = field(init=False)
    roles: Array = field(init=False)

    def to_rank0(self, own_s: Array) -> Array:
        """Return times of the rank's own clock as `rank0_s` has them."""
        knots_s, indices = np.unique(self.own_s, return_index=True)
        return np.interp(own_s, knots_s, self.rank0_s.ravel()[indices])


def align(nodes: Sequence[Node], known: Mapping[int, Sequence[Comparison]]) -> set[int]:
    """Set the times, errors and roles of nodes; return ranks whose messages contradict `known`.

    Their receives that end before the send began get no arrow.
    """
    own_s, calls, is_source, is_target = (
        np.concatenate([getattr(node, name) for node in nodes])
        for name in ("own_s", "calls", "is_source", "is_target")
    )
    rows = [len(node.own_s) for node in nodes]
    rank_of = np.repeat([node.head.rank for node in nodes], rows)
    is_recv = is_target & ~is_source
    is_target &= np.repeat([node.head.device != "cuda" for node in nodes], rows)
    own_s, lanes = own_s.ravel(), list[Array]()  # the times of a rank, in order
    x, errors_s = np.empty_like(own_s), np.empty_like(own_s)
    for rank in np.unique(rank_of):
        lane = np.flatnonzero(rank_of.repeat(2) == rank)
        lanes.append(lane := lane[np.argsort(own_s[lane], kind="stable")])
        offsets_s, errors_s[lane] = offset(known[rank], own_s[lane])
        x[lane] = own_s[lane[0]] - offsets_s
        own_s[lane] -= own_s[lane[0]]  # small numbers keep nanoseconds
    x -= (own_s + x).min()
    sources, targets = 2 * np.flatnonzero(is_source), 2 * np.flatnonzero(is_target) + 1
    ends = (calls[sources // 2], sources), (calls[targets // 2], targets)
    low = _least(x - errors_s, x + errors_s, own_s, lanes, *ends)
    high = -_least(-x - errors_s, errors_s - x, -own_s, lanes, *reversed(ends))
    rank0_s = (own_s + (low + high) / 2).reshape(-1, 2)
    begins_s, ends_s = (rank0_s := rank0_s - rank0_s.min()).T
    errors_s = (abs(high - low) / 2).reshape(-1, 2)

    # Of one call, a sender or else the rank that began first comes first.
    order = np.lexsort((begins_s, is_recv, calls))
    is_first = np.append(True, calls[order][1:] != calls[order][:-1])
    start = order[is_first][np.cumsum(is_first) - 1]
    is_finish = ~is_first & (ends_s[order] > begins_s[start] + MARGIN_S / 2) & ~is_recv[start]
    is_finish &= calls[order] >= 0
    roles = np.full(len(calls), "")
    roles[order[is_finish]], roles[start[is_finish]] = "f", "s"

    cuts = np.cumsum(rows)[:-1]
    parts = (np.split(each, cuts) for each in (rank0_s, errors_s, roles))
    for node, node.rank0_s, errors_s, node.roles in zip(nodes, *parts, strict=True):
        # Between two of these times, x is taken as linear.
        gap_s = np.diff(np.sort(node.own_s, axis=None)).max()
        node.error_s = float(errors_s.max()) + (WANDER * gap_s if errors_s.any() else 0.0)
    latest_s = np.full(calls.max() + 2, -np.inf)
    np.maximum.at(latest_s, calls[is_source], begins_s[is_source])
    return {*rank_of[is_target & (ends_s < latest_s[calls] + MARGIN_S / 2)].tolist()}


def _least(
    lowest: Array,
    highest: Array,
    own_s: Array,
    lanes: Sequence[Array],
    sources: tuple[Array, Array],
    targets: tuple[Array, Array],
) -> Array:
    """Return the least x from `lowest` on; sources and targets are calls and indices of times."""
    x = lowest
    for _ in range(MOST_PASSES):
        before, x = x, x.copy()
        latest_s = np.full(max(sources[0].max(initial=0), targets[0].max(initial=0)) + 1, -np.inf)
        np.maximum.at(latest_s, sources[0], (own_s + x)[sources[1]])
        bound = latest_s[targets[0]] + MARGIN_S - own_s[targets[1]]
        x[targets[1]] = np.maximum(x[targets[1]], bound)
        for lane in lanes:
            change = DRIFT * abs(own_s[lane])
            later = np.maximum.accumulate(x[lane] + change) - change
            x[lane] = np.maximum.accumulate((later - change)[::-1])[::-1] + change
        x = np.minimum(x, highest)
        if (x - before).max() < MARGIN_S / 10:
            break
    return x
