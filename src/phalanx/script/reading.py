"""Which batches a script has read: what its forward is at, and whether its pass is over."""

from __future__ import annotations

import warnings

import torch

from phalanx.comm.comm import Comm
from phalanx.errors import ScriptError
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
        self._pass: tuple[RankLoader, int] | None = None
        self._open: tuple[RankLoader, int] | None = None
        self._unused: set[RankLoader] = set()
        self._calls: dict[str, int] = {}
        self._is_warned = False

    def note(self, loader: RankLoader) -> None:
        """Record that `loader` has yielded a batch."""
        self.last = loader
        self.is_evaluation = not torch.is_grad_enabled()
        if not self.is_evaluation:  # a batch of an evaluation ends no pass of the training
            self._check_pass(loader)
            self.trained, self._calls = loader, {}
            self._unused.add(loader)
            # Of several read in turns the first, and none whose pass has ended: a validation's, or
            # one that was left before a backward used its batch.
            is_new = loader is self._leading and self._pass != (loader, loader.num_begun)
            if self._leading is None or not self._leading.batches_done or is_new:
                self._leading = loader
                self._pass = loader, loader.num_begun
            self.num_batches += 1

    def _check_pass(self, loader: RankLoader) -> None:
        """Refuse to begin a pass within a step that a pass over the same loader has begun."""
        if self._open is not None and self._open[0] is loader and self._open[1] != loader.num_begun:
            raise ScriptError(
                "a pass over the loader begins within a step: the pass before ended with fewer "
                "calls of run.backward than accumulation, whose gradients would be added to those "
                "of this pass; call run.backward for a batch before the next is read, let the "
                "first loader of a zip be the shortest, and break off where run.is_step_end"
            )

    @property
    def seen(self) -> str:
        """What was seen of a stream, see `RankLoader.seen`."""
        return "" if self.trained is None else self.trained.seen

    def check_stream(self, is_same: bool) -> None:
        """Warn once where the ranks have seen unlike batches of a stream."""
        if self.trained is not None and not (is_same or self._is_warned):
            self._is_warned = True
            self.trained.warn_of_streams()

    def warn_of_others(self, comm: Comm) -> None:
        """Warn of ranks that read no prepared loader, each of which may read all samples."""
        if self.trained is None and comm.size("data") > 1 and comm.coord("job") == 0:
            warnings.warn(
                "no batch was read off a prepared DataLoader, so each rank must read samples of "
                "its own, or they count once for each rank; give the DataLoader to run.prepare, "
                "and iterate over what it returns",
                stacklevel=2,
            )

    def is_pass_over(self) -> bool:
        """Return whether the batches read since the last backward end a pass of the training."""
        return self._leading is not None and self._leading.is_last

    def use(self, is_step_end: bool) -> None:
        """Record that a backward has used what was read."""
        for loader in self._unused:
            loader.is_used = loader.is_used or loader.batches_done > 0
        self._unused.clear()
        if is_step_end:
            self._open = None
        else:
            self._open = self._open or self._pass
        self._leading = None

    def forget(self) -> None:
        """Record that the step under way is given up."""
        self._open = None

    def position(self, steps_done: int) -> Place | None:
        """Return the position of the forward under way; None where no loader is prepared."""
        if self.trained is None:
            return None
        return Place(steps_done, self.trained.rows, self._calls)
