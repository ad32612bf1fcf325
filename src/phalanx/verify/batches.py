"""Awkward batches for the verification of decoders, and the split of a batch into microbatches.

Rows have documents of different lengths and labels that the loss ignores. In every second step all
labels of the first data rank are ignored (if there are several data ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.data.rows import count_rows, take_rows
from phalanx.data.samples import Batch
from phalanx.models.loss import IGNORE
from phalanx.models.shape import ModelShape


def decoder_batches(
    shape: ModelShape,
    num_steps: int,
    num_rows: int | Sequence[int],
    seq_len: int,
    num_data_ranks: int,
    seed: int = 0,
) -> list[Batch]:
    """Return the global batch of each step, to be split by rows over the data ranks.

    `num_rows` is the number of rows of every step, or a sequence with the number of each step.
    """
    counts = [num_rows] * num_steps if isinstance(num_rows, int) else num_rows
    generator = torch.Generator().manual_seed(seed)
    positions_T = torch.arange(seq_len)
    batches: list[Batch] = []
    first = 0
    for step, num_rows in enumerate(counts[:num_steps]):
        tokens_BT = torch.randint(shape.vocab_size, (num_rows, seq_len + 1), generator=generator)
        labels_BT = tokens_BT[:, 1:].clone()
        num_ignored_B1 = torch.randint(seq_len, (num_rows, 1), generator=generator)
        labels_BT[positions_T < num_ignored_B1] = IGNORE
        if step % 2 and num_data_ranks > 1:
            labels_BT[::num_data_ranks] = IGNORE  # rank r of R takes rows r, r + R, ...
        begins_BT = torch.rand(num_rows, seq_len, generator=generator) < 3 / seq_len
        begins_BT[:, 0] = False
        starts_BT = torch.where(begins_BT, positions_T, 0).cummax(1).values
        batch = Batch(
            tokens_BT=tokens_BT[:, :-1].contiguous(),
            labels_BT=labels_BT,
            positions_BT=positions_T - starts_BT,
            documents_BT=begins_BT.cumsum(1),
            rows_B=torch.arange(first, first + num_rows),
        )
        first += num_rows
        batches.append(batch)
    return batches


def rows_of(batch: Any, data_rank: int, num_data_ranks: int, accumulation: int) -> list[Tensor]:
    """Return the row indices of each microbatch of a data rank: every `num_data_ranks`-th row."""
    rows = torch.arange(data_rank, count_rows(batch), num_data_ranks)
    return list(rows.tensor_split(accumulation))


def split(batch: Any, data_rank: int, num_data_ranks: int, accumulation: int) -> list[Any]:
    """Return the microbatches of a data rank, with the rows of `rows_of`."""
    microbatches = rows_of(batch, data_rank, num_data_ranks, accumulation)
    return [take_rows(batch, rows) for rows in microbatches]
