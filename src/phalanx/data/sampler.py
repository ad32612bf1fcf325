"""A sampler for loops of your own: torch's DistributedSampler, that can go on from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from phalanx.data.order import permute
from phalanx.errors import ConfigError

_CHUNK = 4096


class GlobalSampler(DistributedSampler[int]):
    """A DistributedSampler that can go on from anywhere.

    Rank r of R draws the positions r, r + R, r + 2R, ... of the epoch. The tail that does not fill
    all ranks is padded with samples from the start of the epoch, or dropped. Without shuffling it
    gives index for index what torch's gives; with it, the order comes from `permute`.

    The state is one position in the epoch, so it can be loaded with another number of ranks.
    Counting is by what this iterator has given out: with a DataLoader that reads ahead, load a
    state whose `consumed` you have counted yourself.
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
        if not dist.is_available() or not dist.is_initialized():  # of a process alone
            num_replicas = 1 if num_replicas is None else num_replicas
            rank = 0 if rank is None else rank
        super().__init__(cast(Any, dataset), num_replicas, rank, shuffle, seed, drop_last)
        self._size = len(dataset)
        self._start = self._drawn = 0

    def __len__(self) -> int:
        left = self._size - self._start
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        num_samples, start, count = self._size, self._start, len(self)
        self._drawn = 0
        for begin in range(0, count, _CHUNK):
            turns = np.arange(begin, min(begin + _CHUNK, count), dtype=np.int64)
            # What the modulus brings back to the start of the epoch is the padding.
            positions = (start + self.rank + self.num_replicas * turns) % num_samples
            if self.shuffle:
                positions = permute(positions, num_samples, self.seed, self.epoch)
            for sample in positions.tolist():
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
        """Return the epoch and the position in it up to which all ranks together have drawn."""
        consumed = self._start + self._drawn * self.num_replicas
        return {"epoch": self.epoch, "consumed": min(consumed, self._size)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, of any number of ranks."""
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        if not 0 <= consumed <= self._size:
            raise ConfigError(
                f"the state of the sampler has consumed {consumed} samples of an epoch of "
                f"{self._size}"
            )
        self.epoch, self._start, self._drawn = epoch, consumed, 0
