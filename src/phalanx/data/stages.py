"""Stages: the parts of a run whose samples differ in length, with each token once an epoch.

A *place* is a token of the file that another follows: a sample reads the tokens of its places and
predicts the one after each. An epoch is every place once. Where a stage ends inside an epoch, the
places of its samples that were not consumed are left; their tokens lie in the file as stretches:

    file        |0 0 0 0|1 1 1 1|2 2 2 2|3 3 3 3|4 4 4 4|5 5 5 5|6 6 .|    samples of 4; 0, 3 gone
    stretches           |a a a a a a a a|       |b b b b b b b b b b .|
    samples of 6        |A A A A A A C C|       |B B B B B B C C C C .|    C joins two stretches

Each stretch is cut from its beginning, so that as many new samples as possible are text as it
stands. The ends, each shorter than a sample, are laid end to end in the order of the file and cut
again. A join is a boundary between documents, see `Samples`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.config import Stage
from phalanx.data.order import Order


@dataclass(frozen=True, eq=False)
class Rest:
    """What is left of an epoch, as one line of places.

    Attributes:
        begins_S: place in the file at which each of S stretches begins, int64.
        offsets: place in the line at which each begins, and the length of the line: S + 1 numbers.
    """

    begins_S: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def places(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the places in the file of places in the line, each in [0, len)."""
        stretch = np.searchsorted(self.offsets, at, side="right") - 1
        return self.begins_S[stretch] + at - self.offsets[stretch]

    def count_joined(self, seq_len: int) -> int:
        """Count the samples of `seq_len` that join stretches."""
        joins = self.offsets[1:-1]
        return len(np.unique(joins[joins % seq_len > 0] // seq_len))

    def after(self, left: npt.NDArray[np.int64], seq_len: int, unit: int) -> Rest:
        """Return what is left where of the samples of `seq_len` only `left` are.

        Parts of `unit` tokens are taken from the beginning of each stretch, the ends come last.
        """
        begins, ends = _runs(np.sort(left), np.sort(left) + 1)
        begins, ends = begins * seq_len, np.minimum(ends * seq_len, len(self))
        cuts = np.unique(np.concatenate([begins, ends, self.offsets]))  # within runs and stretches
        run = np.searchsorted(begins, cuts[:-1], side="right") - 1
        is_left = (run >= 0) & (cuts[:-1] < ends[run])
        places, lengths = self.places(cuts[:-1][is_left]), np.diff(cuts)[is_left]
        by_place = np.argsort(places)
        begins, ends = _runs(places[by_place], (places + lengths)[by_place])
        whole = (ends - begins) // unit * unit
        begins, lengths = (
            np.concatenate([begins, begins + whole]),
            np.concatenate([whole, ends - begins - whole]),
        )
        return Rest(begins[lengths > 0], _offsets(lengths[lengths > 0]))


def _runs(
    begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each run of intervals that touch begins and ends; they are in rising order."""
    is_first = np.append(True, begins[1:] != ends[:-1])
    return begins[is_first], ends[np.append(is_first[1:], True)]


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.append(np.int64(0), np.cumsum(lengths))


def order_of(
    stages: Sequence[Stage], num_places: int, seed: int = 0, is_shuffled: bool = True
) -> tuple[Order, Rest | None]:
    """Return the order of the samples of the last of the stages of a run, from its beginning.

    Beside it stands what the earlier ones have left of an epoch, if anything; `num_places` are the
    places of an epoch.
    """
    file = Rest(np.zeros(1, np.int64), np.array([0, num_places]))
    order, rest = _order(stages[0], num_places, 0, None, seed, is_shuffled), None
    for before, stage in itertools.pairwise(stages):
        begin, end = order.epoch_at(before.consumed)
        left = order.samples(np.arange(before.consumed, end))
        epoch = order.first_epoch + (end - order.num_rest) // order.num_samples
        if rest is not None and begin < order.num_rest:
            left -= order.num_samples
            rest = rest.after(left, before.seq_len, stage.shuffle_len)
        elif before.consumed > begin:
            rest = file.after(left, before.seq_len, stage.shuffle_len)
        else:  # the whole epoch is to come
            rest, epoch = None, epoch - 1
        order = _order(stage, num_places, epoch, rest, seed, is_shuffled)
    return order, rest


def _order(
    stage: Stage, num_places: int, epoch: int, rest: Rest | None, seed: int, is_shuffled: bool
) -> Order:
    return Order(
        num_samples=-(-num_places // stage.seq_len),
        seed=seed,
        is_shuffled=is_shuffled,
        together=stage.shuffle_len // stage.seq_len,
        first_epoch=epoch,
        num_rest=0 if rest is None else -(-len(rest) // stage.seq_len),
    )
