"""One microbatch on one rank.

Legend: B rows of the microbatch, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.models.attention import to_device


@dataclass(frozen=True)
class Batch:
    """A microbatch. All microbatches have the same shape; missing rows are padded as empty rows.

    Attributes:
        tokens_BT: int64 token ids; 0 in empty rows and after the last token of the data.
        labels_BT: int64 id of the next token; IGNORE where there is no label.
        positions_BT: int64 position of each token, counted from the first token of its document
            in the row; without a document mask, counted from the start of the row.
        documents_BT: int64 index of each token's document in its row, from 0; None if each row
            contains one document, or without a document mask. It stays on the host.
        rows_B: int64 position of each row in the stream, or its sample in an evaluation; -1 for an
            empty row.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None
    rows_B: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device, without a synchronization with its running kernels.

        `documents_BT` stays on the host, which computes document boundaries; see `documents_of`.
        """
        names = ("tokens_BT", "labels_BT", "positions_BT", "rows_B")
        device = torch.device(device)
        return replace(self, **{name: to_device(getattr(self, name), device) for name in names})
