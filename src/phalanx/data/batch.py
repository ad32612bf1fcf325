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
    """A microbatch. All have the full shape; a row that is missing is an empty row.

    Attributes:
        tokens_BT: int64 ids; 0 in empty rows and after the last token of the data.
        labels_BT: int64, the token after each, and IGNORE where none counts.
        positions_BT: int64, the position of each token in its document (in its row, if documents
            are not kept apart), counted from the first token of it in the row.
        documents_BT: int64, the number of each token's document in its row, from 0; None if each
            row holds one document, or documents are not kept apart. It stays on the host.
        rows_B: int64, the global position of each row, and -1 for an empty row.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None
    rows_B: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device, without waiting for what runs there.

        `documents_BT` stays: the host works out where documents stand, see `documents_of`.
        """
        names = ("tokens_BT", "labels_BT", "positions_BT", "rows_B")
        device = torch.device(device)
        return replace(self, **{name: to_device(getattr(self, name), device) for name in names})
