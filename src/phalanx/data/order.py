"""The shuffled order of the samples: a pure function of (seed, epoch, position).

A small Feistel network (Luby and Rackoff 1988) permutes the integers below a power of four. Results
outside [0, N) are permuted again until they are inside (cycle walking: Black and Rogaway 2002,
section 3). So the sample at any position of any epoch is computed without a list of N integers.

A mixture deals positions to sources by weights, with the same pattern in each period:

```
weights 3, 1, 1   position   0  1  2  3  4 |  5  6  7  8  9 | 10 ...
                  source     0  1  0  2  0 |  0  1  0  2  0 |  0
                  its nth    0  0  1  0  2 |  3  1  4  1  5 |  6    position in that source's order
```
"""

from __future__ import annotations

import functools
import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 8


def permute(
    positions: npt.NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the samples at `positions`, in [0, num_samples), of an epoch.

    Each epoch has a different order; `seed` determines all of them.
    """
    half = np.uint64(max(1, (max(num_samples - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    digest = hashlib.blake2b(f"{seed},{epoch},{num_samples}".encode(), digest_size=8 * _NUM_ROUNDS)
    keys = np.frombuffer(digest.digest(), dtype="<u8")
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=np.bool_)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(num_samples)
    return values.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit numbers (the finalizer of SplitMix64: Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@functools.lru_cache(4)
def pattern_of(weights: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the source of each position of a period, and its number among that source's positions.

    The period P is the sum of the weights w. Of the first p positions, for any p, source s has more
    than p w[s] / P - 1 and fewer than p w[s] / P + 1. For this its j-th position is one of
    floor(j P / w[s]) to ceil((j + 1) P / w[s]) - 1, and of the sources whose range has begun the
    one whose range ends first is next: earliest deadline first, which meets all deadlines if they
    can be met (Baruah et al. 1996: they can).
    """
    period = sum(weights)
    source = np.empty(period, dtype=np.int64)
    nth = np.empty(period, dtype=np.int64)
    waiting = [(0, number) for number in range(len(weights))]  # (begin of the range, source)
    ready = list[tuple[int, int]]()  # (end of the range, source)
    done = [0] * len(weights)
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            number = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(done[number] + 1) * period // weights[number]), number))
        number = heapq.heappop(ready)[1]
        source[position], nth[position] = number, done[number]
        done[number] += 1
        if done[number] < weights[number]:
            heapq.heappush(waiting, (done[number] * period // weights[number], number))
    return source, nth


@dataclass(frozen=True)
class Order:
    """The stream of samples: the concatenation of all epochs.

    Each epoch has a different order, or runs from 0 to num_samples - 1 if it is not shuffled.

    Attributes:
        num_samples: number of samples of an epoch.
        seed: seed of the order of all epochs.
        is_shuffled: whether the samples of each epoch are shuffled.
        first_epoch: number of the first epoch of the stream; above 0 if a resumed run has changed
            the length of its samples.
        sources: the orders of the sources of a mixture, whose samples are numbered one source after
            the other; empty without a mixture. An epoch then has as many positions as all sources
            have samples, and each source has epochs of its own.
        weights: the positions of each source in a period of the mixture.
    """

    num_samples: int
    seed: int = 0
    is_shuffled: bool = True
    first_epoch: int = 0
    sources: tuple[Order, ...] = ()
    weights: tuple[int, ...] = ()

    def mixed(self, sizes: Sequence[int], weights: Sequence[int]) -> Order:
        """Return a mixture of sources with `sizes` samples, or itself if there are no weights."""
        if not weights:
            return self
        sources = tuple(replace(self, num_samples=size) for size in sizes)
        return replace(self, sources=sources, weights=tuple(weights))

    def samples(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples at stream positions `positions`."""
        if self.sources:
            period, in_period = np.divmod(positions, sum(self.weights))
            source, nth = (table[in_period] for table in pattern_of(self.weights))
            mixed, begin = np.empty_like(positions), 0
            for number, (order, weight) in enumerate(zip(self.sources, self.weights, strict=True)):
                here = source == number
                mixed[here] = begin + order.samples(period[here] * weight + nth[here])
                begin += order.num_samples
            return mixed
        epochs, in_epoch = np.divmod(positions, self.num_samples)
        if not self.is_shuffled:
            return in_epoch
        result = np.empty_like(in_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            number = self.first_epoch + int(epoch)
            result[here] = permute(in_epoch[here], self.num_samples, self.seed, number)
        return result
