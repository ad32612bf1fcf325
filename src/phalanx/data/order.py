"""The shuffled order of the samples: a pure function of (seed, epoch, position).

A small Feistel network (Luby and Rackoff 1988) permutes the integers below a power of four. Results
outside [0, N) are permuted again until they are inside (cycle walking: Black and Rogaway 2002,
section 3). So the sample at any position of any epoch is computed without a list of N integers.
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
    """

    num_samples: int
    seed: int = 0
    is_shuffled: bool = True
    first_epoch: int = 0

    def samples(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples at stream positions `positions`."""
        epochs, in_epoch = np.divmod(positions, self.num_samples)
        if not self.is_shuffled:
            return in_epoch
        result = np.empty_like(in_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            number = self.first_epoch + int(epoch)
            result[here] = permute(in_epoch[here], self.num_samples, self.seed, number)
        return result
