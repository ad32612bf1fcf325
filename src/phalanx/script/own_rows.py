"""Passes over the data from which a script takes numbers of one rank for numbers of all.

    for x, y in held_back:                                 this rank's rows
        right += (model(x).argmax(1) == y).sum()
    run.print(right / len(held_back.dataset))              a half on two ranks: `run.sum` is missing

Nothing shows what a script does with a number of its own. But a pass without gradients is made for
its numbers, and so is a division by the length of the dataset after a pass of training. Where
nothing has been added up over the ranks since such a pass began, the script is warned. It is no
error: the script may add up by other means, as metrics that gather by themselves do, or want
nothing but the forward.
"""

from __future__ import annotations

import warnings
import weakref

from phalanx.comm.comm import Comm
from phalanx.script.loader import RankLoader


class OwnRows:
    """The passes whose numbers have not been added up over the ranks yet."""

    def __init__(self, comm: Comm) -> None:
        self._is_watching = comm.size("data") > 1 and comm.is_first
        self._seen: weakref.WeakKeyDictionary[RankLoader, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Of each loader the pass, and this rank's rows of it."""
        self._told: weakref.WeakSet[RankLoader] = weakref.WeakSet()

    def note(self, loader: RankLoader) -> None:
        """Record that `loader` has yielded a batch."""
        if self._is_watching and loader not in self._told:
            number, num_rows = self._seen.get(loader, (loader.epoch, 0))
            if number != loader.epoch:
                num_rows = 0
            loader.is_dataset_read = False
            self._seen[loader] = loader.epoch, num_rows + len(loader.rows)

    def add_up(self) -> None:
        """Record that the script has added something up over the ranks, or knows the count."""
        self._seen.clear()

    def warn(self) -> None:
        """Warn of the passes that are over."""
        for loader, (number, num_rows) in list(self._seen.items()):
            if loader.epoch == number:  # it goes on, or was a look at the first batch
                continue
            del self._seen[loader]
            if loader.is_used and not loader.is_dataset_read:
                continue
            self._told.add(loader)
            warnings.warn(
                f"a pass over a prepared loader has ended, of which this rank has had {num_rows} "
                "rows, and nothing was added up over the ranks since it began: what the script has "
                "counted is of these rows alone; use run.sum, run.mean or run.gather",
                stacklevel=3,
            )
