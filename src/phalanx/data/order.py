"""The order of the samples: a pure function of (seed, epoch, position).

A small Feistel network (Luby and Rackoff 1988) permutes the numbers below a power of four; a number
that leaves [0, N) is sent through again until it is back (cycle walking: Black and Rogaway 2002,
section 3). So any place in any epoch is found at once, with no list of N numbers in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from phalanx.errors import ConfigError

_NUM_ROUNDS = 8
_CHUNK = 4096


def permute(
    positions: npt.NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the samples that stand at `positions` of an epoch.

    Args:
        positions: places in [0, num_samples), in any number and order.
        num_samples: samples in the data set.
        seed: fixes the orders of all epochs.
        epoch: each has an order of its own.
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
    """The stream of samples: the epochs one after the other, each in an order of its own.

    Attributes:
        num_samples: samples in the data set, at least 1.
        seed: fixes the order.
        is_shuffled: whether epochs are shuffled, or each goes from 0 to num_samples - 1.
    """

    num_samples: int
    seed: int = 0
    is_shuffled: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"the order has {self.num_samples} samples; it needs at least 1")

    def samples(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples at `positions` of the stream, each in [0, num_samples)."""
        epochs, places = np.divmod(positions, self.num_samples)
        if not self.is_shuffled:
            return places
        result = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = permute(places[here], self.num_samples, self.seed, int(epoch))
        return result


class GlobalSampler(Sampler[int]):
    """A sampler with the semantics of torch's DistributedSampler, that can go on from anywhere.

    Rank r of R draws the places r, r + R, r + 2R, ... of the epoch. The tail that does not fill all
    ranks is padded with samples from the start of the epoch, or dropped. Without shuffling it gives
    index for index what torch's gives; with it, the order comes from `permute`.

    The state is one place in the epoch, so it can be loaded with another number of ranks. Counting
    is by what this iterator has given out: with a DataLoader that reads ahead, load a state whose
    `consumed` you have counted yourself.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
            if num_replicas is None:
                num_replicas = torch.distributed.get_world_size() if has_group else 1
            if rank is None:
                rank = torch.distributed.get_rank() if has_group else 0
        if not 0 <= rank < num_replicas:
            raise ConfigError(
                f"rank is {rank}; with {num_replicas} replicas it is 0 to {num_replicas - 1}"
            )
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._start = 0
        self._drawn = 0

    def __len__(self) -> int:
        left = len(self.dataset) - self._start
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        num_samples, start, count = len(self.dataset), self._start, len(self)
        self._drawn = 0
        for begin in range(0, count, _CHUNK):
            turns = np.arange(begin, min(begin + _CHUNK, count), dtype=np.int64)
            # What the modulus brings back to the start of the epoch is the padding.
            places = (start + self.rank + self.num_replicas * turns) % num_samples
            if self.shuffle:
                places = permute(places, num_samples, self.seed, self.epoch)
            for sample in places.tolist():
                self._drawn += 1
                yield sample
        # The state still says that all is drawn; the next iterator begins at the start.
        self._start, self._drawn = 0, -(-num_samples // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is drawn next, from its start; the same again changes nothing."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._start = self._drawn = 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the place in it up to which all ranks together have drawn."""
        consumed = self._start + self._drawn * self.num_replicas
        return {"epoch": self.epoch, "consumed": min(consumed, len(self.dataset))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, of any number of ranks."""
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        if not 0 <= consumed <= len(self.dataset):
            raise ConfigError(
                f"the state of the sampler has consumed {consumed} samples of an epoch of "
                f"{len(self.dataset)}"
            )
        self.epoch, self._start, self._drawn = epoch, consumed, 0
