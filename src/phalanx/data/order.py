"""The order of the samples: a pure function of (seed, epoch, position).

A small Feistel network (Luby and Rackoff 1988) permutes the numbers below a power of four; a number
that leaves [0, N) is sent through again until it is back (cycle walking: Black and Rogaway 2002,
section 3). So any position in any epoch is found at once, with no list of N numbers in memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 8


def permute(
    positions: npt.NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the samples that stand at `positions`, in [0, num_samples), of an epoch.

    Each epoch has an order of its own; `seed` fixes them all.
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


@dataclass(frozen=True)
class Order:
    """The stream of samples: the epochs one after the other.

    Each epoch has an order of its own, or goes from 0 to num_samples - 1 if it is not shuffled.

    Attributes:
        num_samples: samples of an epoch.
        seed: fixes the order of each epoch.
        is_shuffled: whether each epoch has an order of its own.
        first_epoch: number of the epoch at the beginning of the stream; above 0 where a run has
            changed the length of its samples.
    """

    num_samples: int
    seed: int = 0
    is_shuffled: bool = True
    first_epoch: int = 0

    def samples(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples at `positions` of the stream."""
        epochs, in_epoch = np.divmod(positions, self.num_samples)
        if not self.is_shuffled:
            return in_epoch
        result = np.empty_like(in_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            number = self.first_epoch + int(epoch)
            result[here] = permute(in_epoch[here], self.num_samples, self.seed, number)
        return result
