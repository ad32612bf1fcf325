"""Track which batches a script has read, to find the batch of a backward and the end of a pass.

for x, y in loader              one batch at a time waits for a backward
x, y = ahead; ahead = next      two batches wait: a backward uses the older one
if is_bad(x): continue          a batch that the script drops no longer waits
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from phalanx.data.rows import tensors_of
from phalanx.errors import ScriptError
from phalanx.parallel.dropout import MaskPosition
from phalanx.script.loader import RankLoader


class ReadBatch:
    """A batch that the script has read with gradients enabled.

    Attributes:
        loader: loader that yielded the batch.
        number: number of its pass, from `RankLoader.num_begun`.
        is_last: whether it is the last batch of its pass.
        rows: see `RankLoader.rows`.
        calls: see `MaskPosition.calls`.
    """

    def __init__(self, loader: RankLoader, given: Any) -> None:
        """Record the batch `given`, which `loader` has just yielded."""
        self.loader, self.number = loader, loader.num_begun
        self.is_last, self.rows = loader.is_last, loader.rows
        self.calls: dict[str, int] = {}
        self._tensors = [TensorWeakRef(tensor) for tensor in tensors_of(given)]

    @property
    def is_held(self) -> bool:
        """Whether the script still references a tensor of it; False if it has no tensors."""
        return any(tensor() is not None for tensor in self._tensors)


class BatchTracker:
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
        self._ahead: deque[ReadBatch] = deque()
        self._used: ReadBatch | None = None
        self._step_start: ReadBatch | None = None
        self._unused: set[RankLoader] = set()
        self._reads_ahead = False
        self._is_warned = False

    def note(self, loader: RankLoader, given: Any) -> None:
        """Record that `loader` has yielded the batch `given`."""
        self.last = loader
        self.is_evaluation = not torch.is_grad_enabled()
        if self.is_evaluation:  # an evaluation batch does not end a training pass
            return
        self.trained = loader
        self._unused.add(loader)
        self.num_batches += 1
        self._drop_released()
        if self._ahead:
            before = self._ahead[-1]
            if before.loader is not loader:
                if before.loader.batches_done:
                    return  # with alternating loaders, the first defines the end of a pass
                self._ahead.clear()  # they were a peek, or a validation
            elif before.number != loader.num_begun and not before.is_last:
                self._ahead.clear()  # they were a peek, or a pass that was left early
        self._ahead.append(ReadBatch(loader, given))

    def _drop_released(self) -> None:
        """Remove the oldest batches that the script has dropped before a backward used them.

        The newest batch stays even if it was dropped, because the script may have converted it.
        A batch in a reference cycle is held until Python collects garbage, whose time differs
        between ranks. So garbage is collected here, until a batch is found to wait in fact.
        """
        while len(self._ahead) > 1:
            if self._ahead[0].is_held and not self._reads_ahead:
                gc.collect()
                self._reads_ahead = self._ahead[0].is_held
            if self._ahead[0].is_held:
                return
            self._ahead.popleft()

    @property
    def current(self) -> ReadBatch | None:
        """Batch of the current forward or backward: the oldest waiting, else the last used."""
        self._drop_released()
        return self._ahead[0] if self._ahead else self._used

    @property
    def num_ahead(self) -> int:
        """Number of batches that wait for a backward, including the current one."""
        self._drop_released()
        return len(self._ahead)

    @property
    def waiting_rows(self) -> set[int]:
        """Numbers of rows of the batches that wait for a backward."""
        return {len(batch.rows) for batch in self._ahead}

    @property
    def seen(self) -> str:
        """Last digested batch of the training stream, see `RankLoader.stream_digest`."""
        return "" if self.trained is None else self.trained.stream_digest

    def check_stream(self, is_same: bool) -> None:
        """Warn once if the ranks have seen different batches of a stream (not `is_same`)."""
        if self.trained is not None and not (is_same or self._is_warned):
            self._is_warned = True
            self.trained.warn_of_streams()

    def is_pass_over(self) -> bool:
        """Return whether a backward that starts now uses the last batch of a pass.

        Raises:
            ScriptError: the batch belongs to a new pass, but the step started in the pass before.
        """
        batch, begun = self.current, self._step_start
        if batch is None or not self._ahead:
            return False
        if begun is not None and begun.loader is batch.loader and begun.number != batch.number:
            raise ScriptError(
                "a pass over the loader begins within a step: the previous pass ended after fewer "
                "calls of run.backward than accumulation, and its gradients would be added to the "
                "gradients of this pass; make the first loader of a zip the shortest, and break "
                "only where run.is_step_end"
            )
        return batch.is_last

    def use(self, is_step_end: bool) -> None:
        """Record that a backward has used the current batch."""
        for loader in self._unused:
            loader.is_used = loader.is_used or loader.batches_done > 0
        self._unused.clear()
        self._used = self.current
        if self._ahead:
            self._ahead.popleft()
        self._step_start = None if is_step_end else self._step_start or self._used

    def forget(self) -> None:
        """Record that the current step was abandoned."""
        self._step_start = None

    def position(self, steps_done: int) -> MaskPosition | None:
        """Return the mask position of the current forward; None if no prepared loader is read."""
        batch = self.current
        return None if batch is None else MaskPosition(steps_done, batch.rows, batch.calls)
