"""Which batches a script has read: what its forward is at, and whether its pass is over."""

from __future__ import annotations

import torch

from phalanx.parallel.dropout import Place
from phalanx.script.loader import RankLoader


class Reading:
    """The batches that a script has read off its prepared loaders.

    Attributes:
        last: the loader of the last batch, of training or evaluation; None before the first.
        trained: the loader of the last batch read with gradients enabled; None before the first.
        num_batches: batches read with gradients enabled.
        is_evaluation: whether the last batch was read with gradients disabled.
    """

    def __init__(self) -> None:
        self.last: RankLoader | None = None
        self.trained: RankLoader | None = None
        self.num_batches = 0
        self.is_evaluation = False
        self._leading: RankLoader | None = None
        self._calls: dict[str, int] = {}
        self._is_warned = False

    def note(self, loader: RankLoader) -> None:
        """Record that `loader` has yielded a batch."""
        self.last = loader
        self.is_evaluation = not torch.is_grad_enabled()
        if not self.is_evaluation:  # a batch of an evaluation ends no pass of the training
            self.trained, self._calls = loader, {}
            if self._leading is None:  # of several read in turns the first
                self._leading = loader
            self.num_batches += 1

    @property
    def seen(self) -> str:
        """What was seen of a stream, see `RankLoader.seen`."""
        return "" if self.trained is None else self.trained.seen

    def check_stream(self, is_same: bool) -> None:
        """Warn once where the ranks have seen unlike batches of a stream."""
        if self.trained is not None and not (is_same or self._is_warned):
            self._is_warned = True
            self.trained.warn_of_streams()

    def is_pass_over(self) -> bool:
        """Return whether the batches read since the last backward end a pass of the training."""
        return self._leading is not None and self._leading.is_last

    def use(self) -> None:
        """Record that a backward has used what was read."""
        if self.trained is not None:
            self.trained.is_used = True
        self._leading = None

    def position(self, steps_done: int) -> Place | None:
        """Return the position of the forward under way; None where no loader is prepared."""
        if self.trained is None:
            return None
        return Place(steps_done, self.trained.rows, self._calls)
