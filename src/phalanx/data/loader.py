"""The loader: each rank's microbatches, step by step, as a pure function of one integer.

The stream is the epochs one after the other. A step takes the next G positions of it:

```
position   consumed + 0    1    2    3    4    5    6    7         G = 8, R = 2, accumulation 2
rank                0    1    0    1    0    1    0    1           (rank r takes r, r + R, ...)
microbatch          0    0    0    0    1    1    1    1           of 2 rows on each rank
```

So the global batch of a step does not depend on the number of ranks, and a run can resume from
`consumed` with another number of ranks, or another G.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.config import BatchPlan
from phalanx.data.batch import Batch
from phalanx.data.order import Order
from phalanx.data.samples import Samples

Tail = Literal["keep", "drop", "pad"]
"""What becomes of the samples at the end that do not fill a global batch: a batch with empty rows,
nothing, or a batch padded with samples from the start of the last epoch."""


def stream_length(order: Order, epochs: float | None) -> int | None:
    """Return where in the stream `epochs` passes over the data end; None, without end, for None.

    They count from the beginning of the run, which may be before the stream's.
    """
    if epochs is None:
        return None
    end = round((epochs - order.first_epoch) * order.num_samples)
    return max(1 if order.first_epoch == 0 else 0, end)


def total_steps(
    order: Order, global_size: int, epochs: float, tail: Tail = "keep", *, consumed: int = 0
) -> int:
    """Return the steps that a loader has left from `consumed` to the end of `epochs`."""
    end = stream_length(order, epochs)
    assert end is not None
    left = max(0, end - consumed)
    return left // global_size if tail == "drop" else -(-left // global_size)


@dataclass(eq=False)
class Loader:
    """An iterator over steps: each item is the list of this rank's microbatches.

    While the consumer works on one step, a thread prepares the next. An error in it is raised in
    the consumer. Close the loader, or use it as a context, to end the thread.

    Attributes:
        samples: the data set.
        order: the stream of its samples.
        plan: sizes of the batch, and the number of data ranks.
        rank: this rank among the data ranks.
        end: positions in the stream (`stream_length`); None never ends.
        tail: what becomes of the last, partial batch.
        consumed: positions of the stream that belong to the steps given out so far, and of the
            loader that it resumes from. This integer is the whole state.
    """

    samples: Samples
    order: Order
    plan: BatchPlan
    rank: int
    _: KW_ONLY
    end: int | None = None
    tail: Tail = "keep"
    consumed: int = 0

    def __post_init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._next: Future[list[Batch]] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if not self._has_step(self.consumed):
            self.close()
            raise StopIteration
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        if self._next is None:
            self._next = self._thread.submit(self.step_at, self.consumed)
        ready, self._next = self._next, None
        batches = ready.result()
        self.consumed = self._after(self.consumed)
        if self._has_step(self.consumed):
            self._next = self._thread.submit(self.step_at, self.consumed)
        return batches

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. The loader can still be iterated: it starts another one."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._next = None

    def step_at(self, consumed: int) -> list[Batch]:
        """Make this rank's microbatches of the step that begins at position `consumed`."""
        plan = self.plan
        rows = (
            consumed
            + self.rank
            + plan.num_data_ranks * np.arange(plan.microbatch * plan.accumulation, dtype=np.int64)
        )
        samples = self._samples_at(rows)
        if self.tail == "keep":
            rows = np.where(samples >= 0, rows, -1)
        return [
            self.samples.batch(
                samples[begin : begin + plan.microbatch], rows[begin : begin + plan.microbatch]
            )
            for begin in range(0, len(rows), plan.microbatch)
        ]

    def _samples_at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples at positions of the stream, -1 past its end."""
        if self.end is None:
            return self.order.samples(rows)
        if self.tail == "pad":
            num_samples = self.order.num_samples
            begin = (self.end - 1) // num_samples * num_samples
            past = begin + (rows - self.end) % num_samples
            return self.order.samples(np.where(rows < self.end, rows, past))
        samples = self.order.samples(np.minimum(rows, self.end - 1))
        return np.where(rows < self.end, samples, -1)

    def _has_step(self, consumed: int) -> bool:
        if self.end is None:
            return True
        if self.tail == "drop":
            return consumed + self.plan.global_size <= self.end
        return consumed < self.end

    def _after(self, consumed: int) -> int:
        """Return the position after the step that begins at `consumed`."""
        after = consumed + self.plan.global_size
        return after if self.end is None else min(after, self.end)


def evaluation_rows(num_samples: int, limit: int | None = None) -> npt.NDArray[np.int64]:
    """Return the samples to evaluate: all, or `limit` of them spread evenly over the data."""
    if limit is None or limit >= num_samples:
        return np.arange(num_samples, dtype=np.int64)
    return np.arange(limit, dtype=np.int64) * num_samples // max(1, limit)


def evaluation_batches(
    samples: Samples, rows: npt.NDArray[np.int64], *, microbatch: int, rank: int, num_ranks: int
) -> Iterator[Batch]:
    """Yield this data rank's part of an evaluation; each rank yields the same number of batches.

    The samples `rows` are evaluated once over all ranks; rows missing at the end are empty.
    """
    num_batches = -(-len(rows) // (microbatch * num_ranks))
    padded = np.full(num_batches * microbatch * num_ranks, -1, dtype=np.int64)
    padded[: len(rows)] = rows
    for mine in padded.reshape(num_batches, microbatch, num_ranks)[:, :, rank]:
        yield samples.batch(mine, mine)
