"""Models and batches to verify decoders with: random tokens made to be awkward.

Rows have documents of uneven lengths and labels that do not count, and in every second step all
rows of the first data rank have none that count (if there are several ranks).
"""

from __future__ import annotations

import torch

from phalanx.data.batch import Batch
from phalanx.models.decoder import Decoder
from phalanx.models.loss import IGNORE
from phalanx.models.shape import ModelShape


def initial_decoder(shape: ModelShape, seed: int) -> Decoder:
    """Return a float64 decoder with its first weights."""
    model = Decoder(shape).to(torch.float64)
    model.initialize(seed)
    return model


def decoder_batches(
    shape: ModelShape, num_steps: int, num_rows: int, seq_len: int, num_places: int, seed: int = 0
) -> list[Batch]:
    """Return the global batch of each step.

    Args:
        shape: of the decoder.
        num_steps: how many.
        num_rows: rows of each.
        seq_len: tokens of a row.
        num_places: data ranks that the rows will be dealt to.
        seed: fixes the tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        _batch(shape.vocab_size, step, num_rows, seq_len, num_places, generator)
        for step in range(num_steps)
    ]


def _batch(
    vocab_size: int,
    step: int,
    num_rows: int,
    seq_len: int,
    num_places: int,
    generator: torch.Generator,
) -> Batch:
    tokens_BT = torch.randint(vocab_size, (num_rows, seq_len + 1), generator=generator)
    labels_BT = tokens_BT[:, 1:].clone()
    num_ignored_B1 = torch.randint(seq_len, (num_rows, 1), generator=generator)
    places_T = torch.arange(seq_len)
    labels_BT[places_T < num_ignored_B1] = IGNORE
    if step % 2 and num_places > 1:
        labels_BT[::num_places] = IGNORE  # rank r of R takes rows r, r + R, ...
    begins_BT = torch.rand(num_rows, seq_len, generator=generator) < 3 / seq_len
    begins_BT[:, 0] = False
    documents_BT = begins_BT.cumsum(1)
    starts_BT = torch.where(begins_BT, places_T, 0).cummax(1).values
    return Batch(
        tokens_BT=tokens_BT[:, :-1].contiguous(),
        labels_BT=labels_BT,
        positions_BT=places_T - starts_BT,
        documents_BT=documents_BT,
        rows_B=torch.arange(step * num_rows, (step + 1) * num_rows),
    )
