"""The loader: the microbatches of each rank and step, as a pure function of one integer.

The stream of samples is the concatenation of all epochs. A step consumes its next G positions:

```
position   consumed + 0    1    2    3    4    5    6    7         G = 8, R = 2, accumulation 2
rank                0    1    0    1    0    1    0    1           (rank r takes r, r + R, ...)
microbatch          0    0    0    0    1    1    1    1           of 2 rows on each rank
```

So the global batch of a step does not depend on the number of ranks, and a run can resume from
`consumed` with a different number of ranks or a different G.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from phalanx.config import BatchPlan
from phalanx.data.order import Order
from phalanx.data.samples import Batch, Samples

Tail = Literal["keep", "drop", "pad"]
"""Policy for the last samples, which do not fill a global batch: a batch with empty rows (keep), no
batch (drop), or a batch padded with samples from the start of the last epoch (pad)."""


def stream_length(order: Order, epochs: float | None) -> int | None:
    """Return the stream position at which `epochs` passes over the data end; None for no end.

    `epochs` counts from the start of the run, which may be before the start of the stream.
    """
    if epochs is None:
        return None
    end = round((epochs - order.first_epoch) * order.num_samples)
    return max(1 if order.first_epoch == 0 else 0, end)


def total_steps(
    order: Order, global_size: int, epochs: float, tail: Tail = "keep", *, consumed: int = 0
) -> int:
    """Return the number of steps from stream position `consumed` to the end of `epochs`."""
    end = stream_length(order, epochs)
    assert end is not None
    left = max(0, end - consumed)
    return left // global_size if tail == "drop" else -(-left // global_size)


@dataclass(eq=False)
class Loader:
    """An iterator over steps; each item is the list of this rank's microbatches.

    A thread prepares the next step while the consumer works on the current one. An error in the
    thread is raised in the consumer. Close the loader, or use it as a context manager, to end the
    thread.

    Attributes:
        samples: data set.
        order: order of its samples in the stream.
        plan: batch sizes and number of data ranks.
        rank: index of this rank among the data ranks.
        end: length of the stream (`stream_length`); None for no end.
        tail: policy for the last, partial batch.
        consumed: number of stream positions consumed by the steps returned so far, including the
            steps before a resume. This integer is the complete state of the loader.
        device: device of the microbatches; None leaves them in host memory.
        num_rows: rows of the latest global batch.
    """

    samples: Samples
    order: Order
    plan: BatchPlan
    rank: int
    _: KW_ONLY
    end: int | None = None
    tail: Tail = "keep"
    consumed: int = 0
    device: torch.device | None = None
    num_rows: int = field(default=0, init=False)

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
        after = self.consumed + self.plan.global_size
        after = after if self.end is None else min(after, self.end)
        self.num_rows, self.consumed = after - self.consumed, after
        if self._has_step(self.consumed):
            self._next = self._thread.submit(self.step_at, self.consumed)
        return batches if self.device is None else [each.to(self.device) for each in batches]

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. A later iteration starts a new one."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._next = None

    def step_at(self, consumed: int) -> list[Batch]:
        """Return this rank's microbatches of the step that starts at stream position `consumed`."""
        plan = self.plan
        rows = (
            consumed
            + self.rank
            + plan.num_data_ranks * np.arange(plan.microbatch * plan.accumulation, dtype=np.int64)
        )
        if self.end is None:
            samples = self.order.samples(rows)
        elif self.tail == "pad":
            num_samples = self.order.num_samples
            begin = (self.end - 1) // num_samples * num_samples
            past = begin + (rows - self.end) % num_samples
            samples = self.order.samples(np.where(rows < self.end, rows, past))
        else:
            samples = self.order.samples(np.minimum(rows, self.end - 1))
            samples = np.where(rows < self.end, samples, -1)  # an empty row
        if self.tail == "keep":
            rows = np.where(samples >= 0, rows, -1)
        return [
            self.samples.batch(
                samples[begin : begin + plan.microbatch], rows[begin : begin + plan.microbatch]
            )
            for begin in range(0, len(rows), plan.microbatch)
        ]

    def _has_step(self, consumed: int) -> bool:
        if self.end is None:
            return True
        if self.tail == "drop":
            return consumed + self.plan.global_size <= self.end
        return consumed < self.end


def evaluation_rows(num_samples: int, limit: int | None = None) -> npt.NDArray[np.int64]:
    """Return the indices of the samples to evaluate: all, or `limit` samples evenly spaced."""
    if limit is None or limit >= num_samples:
        return np.arange(num_samples, dtype=np.int64)
    return np.arange(limit, dtype=np.int64) * num_samples // max(1, limit)


def evaluation_batches(
    samples: Samples, rows: npt.NDArray[np.int64], *, microbatch: int, rank: int, num_ranks: int
) -> Iterator[Batch]:
    """Yield the evaluation batches of data rank `rank`; all ranks yield the same number.

    Each sample of `rows` is evaluated on exactly one rank; the last batches may have empty rows.
    """
    num_batches = -(-len(rows) // (microbatch * num_ranks))
    padded = np.full(num_batches * microbatch * num_ranks, -1, dtype=np.int64)
    padded[: len(rows)] = rows
    for mine in padded.reshape(num_batches, microbatch, num_ranks)[:, :, rank]:
        yield samples.batch(mine, mine)
