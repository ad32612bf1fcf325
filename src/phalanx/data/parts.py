"""The parts of a run, whose samples differ in length: each token once an epoch over all of them.

A *place* is a token of the file that another follows: a sample reads the tokens of its places and
predicts the one after each. An epoch is every place once. Where a part ends inside an epoch, the
places of its samples that were not consumed are left; their tokens lie in the file as stretches:

    file        |0 0 0 0|1 1 1 1|2 2 2 2|3 3 3 3|4 4 4 4|5 5 5 5|6 6 6|    samples of 4; 0, 3 gone
    stretches           |a a a a a a a a|       |b b b b b b b b b b b|
    samples of 6        |A A A A A A C C|       |B B B B B B C C C C D|    C joins two stretches

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

from phalanx.config import Part
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
        samples = joins[joins % seq_len > 0] // seq_len
        return int(np.count_nonzero(np.diff(samples, prepend=-1)))

    def after(self, left: npt.NDArray[np.int64], seq_len: int, unit: int) -> Rest:
        """Return what is left where of the samples of `seq_len` only `left` are.

        Pieces of `unit` tokens are taken from the beginning of each stretch, the ends come last.
        """
        left = np.sort(left)
        begins, ends = _runs(left, left + 1)
        begins, ends = begins * seq_len, np.minimum(ends * seq_len, len(self))
        # No piece between two cuts is of two runs, or of two stretches.
        cuts = np.sort(np.concatenate([begins, ends, self.offsets]))
        run = np.searchsorted(begins, cuts[:-1], side="right") - 1
        is_left = (run >= 0) & (cuts[:-1] < ends[run]) & (cuts[:-1] < cuts[1:])
        places, lengths = self.places(cuts[:-1][is_left]), np.diff(cuts)[is_left]
        by_place = np.argsort(places)
        begins, ends = _runs(places[by_place], (places + lengths)[by_place])
        whole = (ends - begins) // unit * unit
        lengths = np.concatenate([whole, ends - begins - whole])
        begins = np.concatenate([begins, begins + whole])[lengths > 0]
        return Rest(begins, np.append(0, np.cumsum(lengths[lengths > 0])))


def _runs(
    begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each run of intervals that touch begins and ends; they are in rising order."""
    is_first = np.append(True, begins[1:] != ends[:-1])
    return begins[is_first], ends[np.append(is_first[1:], True)]


def order_of(
    parts: Sequence[Part], num_places: int, seed: int = 0, is_shuffled: bool = True
) -> tuple[Order, Rest | None]:
    """Return the order of the samples of the last of the parts of a run, from its beginning.

    Beside it stands what the earlier ones have left of an epoch, if anything; `num_places` are the
    places of an epoch.
    """
    file = Rest(np.zeros(1, np.int64), np.array([0, num_places]))
    order, rest = _order(parts[0], num_places, 0, None, seed, is_shuffled), None
    for before, part in itertools.pairwise(parts):
        begin, end = order.epoch_at(before.consumed)
        left = order.samples(np.arange(before.consumed, end))
        epoch = order.first_epoch + (end - order.num_rest) // order.num_samples
        if rest is not None and begin < order.num_rest:
            left -= order.num_samples
            rest = rest.after(left, before.seq_len, part.shuffle_len)
        elif before.consumed > begin:
            rest = file.after(left, before.seq_len, part.shuffle_len)
        else:  # the whole epoch is to come
            rest, epoch = None, epoch - 1
        order = _order(part, num_places, epoch, rest, seed, is_shuffled)
    return order, rest


def _order(
    part: Part, num_places: int, epoch: int, rest: Rest | None, seed: int, is_shuffled: bool
) -> Order:
    return Order(
        num_samples=-(-num_places // part.seq_len),
        seed=seed,
        is_shuffled=is_shuffled,
        together=part.shuffle_len // part.seq_len,
        first_epoch=epoch,
        num_rest=0 if rest is None else -(-len(rest) // part.seq_len),
    )
