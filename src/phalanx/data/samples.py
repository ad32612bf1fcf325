"""Samples: fixed-length windows over a token file, and the microbatches made from them.

Legend: B rows, T tokens of a sample, V ids of the tokenizer.

Sample i is tokens[i T : i T + T + 1]: T input tokens, each with the next token as its label. The
last token of a window is only a label there, and the first input of the next window. So each token
of the file except the first is predicted exactly once per epoch. The last sample may be shorter;
its missing labels are IGNORE. Of several files, each has samples of its own, one after the other.

[Note: Boundary] The separator E opens a document: E is its token 0, and the first token of the text
is predicted from E alone. This label counts in the loss, because generation starts from E. The
label E at the last token of a document counts too, because it teaches where a text ends. So the sum
of the losses over a file is the code length of all its documents, and bits per byte divides this
sum by exactly their bytes; E itself counts as 0 bytes.

A marked file, of chats, has whole conversations in each T tokens, and none crosses into the next
sample. Its marks take the place of E: only TRAINED tokens are labels, and OPENS opens a document.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.data.token_file import OPENS, TRAINED, TokenFile
from phalanx.models.attention import to_device
from phalanx.models.loss import IGNORE


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
        reference_BN: float64 log-probability of each document by the reference, see `Samples`;
            None without a reference.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None
    rows_B: Tensor
    reference_BN: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device, without a synchronization with its running kernels.

        `documents_BT` stays on the host, which computes document boundaries; see `documents_of`.
        """
        names = ["tokens_BT", "labels_BT", "positions_BT", "rows_B"]
        names += [] if self.reference_BN is None else ["reference_BN"]
        device = torch.device(device)
        return replace(self, **{name: to_device(getattr(self, name), device) for name in names})


@dataclass(eq=False)
class Samples:
    """The samples of a token file; `len()` is their number per epoch.

    Each process maps the file into memory on first use; a pickle has the file's header but not its
    tokens. With `document_mask`, positions restart at each document, and attention is restricted to
    the document. `reference` has the log-probability of document n of each sample by the model that
    DPO starts from, or NaN if there is no such document.
    """

    file: TokenFile
    seq_len: int
    _: KW_ONLY
    document_mask: bool = True
    reference: npt.NDArray[np.float64] | None = None

    @cached_property
    def _tokens(self) -> Any:
        maps = [leaf.map() for leaf in self.file.leaves]
        return maps[0] if len(maps) == 1 else _Joined(maps)

    @cached_property
    def _bounds(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first token, and the first sample, of each file, and the ends of the last."""
        leaves = self.file.leaves
        first_token = np.cumsum([0, *(leaf.num_tokens for leaf in leaves)])
        first_sample = np.cumsum([0, *(count_samples(leaf, self.seq_len) for leaf in leaves)])
        return first_token, first_sample

    def __getstate__(self) -> dict[str, object]:
        # A memory map would be pickled with all of its tokens.
        return {key: value for key, value in self.__dict__.items() if key != "_tokens"}

    def __len__(self) -> int:
        return count_samples(self.file, self.seq_len)

    def batch(self, samples_B: npt.NDArray[np.int64], rows_B: npt.NDArray[np.int64]) -> Batch:
        """Return a microbatch of `samples_B`, with global positions `rows_B`; -1: an empty row."""
        places_BT, is_label_BT = self._places(samples_B)
        tokens_BT = np.zeros(places_BT.shape, dtype=np.int64)
        labels_BT = np.full_like(tokens_BT, IGNORE)
        tokens_BT[is_label_BT] = self._tokens[places_BT[is_label_BT]]
        labels_BT[is_label_BT] = self._tokens[places_BT[is_label_BT] + 1]
        opens_BT = (tokens_BT == self.file.end_id) & is_label_BT
        if self.file.is_marked:
            opens_BT = (tokens_BT & OPENS) > 0
            tokens_BT &= OPENS - 1
            labels_BT = np.where(labels_BT & TRAINED, labels_BT & (OPENS - 1), IGNORE)
            labels_BT[~is_label_BT] = IGNORE
        positions_BT = np.broadcast_to(np.arange(self.seq_len), tokens_BT.shape)
        documents_BT = None
        if self.document_mask:
            opens_BT[:, 0] = False  # the first document of a row is 0, even if it starts here
            starts_BT = np.maximum.accumulate(np.where(opens_BT, positions_BT, 0), axis=1)
            positions_BT = positions_BT - starts_BT
            if opens_BT.any():
                documents_BT = torch.from_numpy(np.cumsum(opens_BT, axis=1))
        return Batch(
            torch.from_numpy(tokens_BT),
            torch.from_numpy(labels_BT),
            torch.from_numpy(np.ascontiguousarray(positions_BT)),
            documents_BT,
            torch.from_numpy(np.asarray(rows_B, dtype=np.int64)),
            None
            if self.reference is None
            else torch.from_numpy(
                np.where(samples_B[:, None] < 0, np.nan, self.reference[samples_B])
            ),
        )

    def num_documents(self) -> npt.NDArray[np.int64]:
        """Return the number of documents of each sample of a marked file, padding included."""
        opens = (np.asarray(self._tokens[: len(self) * self.seq_len]) & OPENS) > 0
        return opens.reshape(-1, self.seq_len).sum(axis=1)

    def count_bytes(
        self, samples: npt.NDArray[np.int64], token_bytes_V: npt.NDArray[np.int32]
    ) -> int:
        """Return the number of bytes of text in the labels of `samples`; -1 is an empty row.

        With the sum of the losses of these labels, bits per byte = sum / ln 2 / bytes.
        """
        total = 0
        for begin in range(0, len(samples), 1024):
            places, is_label = self._places(samples[begin : begin + 1024])
            labels = self._tokens[places[is_label] + 1]
            total += int(token_bytes_V[labels].sum(dtype=np.int64))
        return total

    def _places(
        self, samples_B: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the file index of each input token, and a mask of the tokens that have a label."""
        first_token, first_sample = self._bounds
        # An empty row, whose sample is -1, comes before the first file.
        leaf_B = np.searchsorted(first_sample[:-1], samples_B, side="right").clip(1) - 1
        begin_B = first_token[leaf_B] + (samples_B - first_sample[leaf_B]) * self.seq_len
        places_BT = begin_B[:, None] + np.arange(self.seq_len)
        is_label_BT = (places_BT >= 0) & (places_BT < first_token[leaf_B + 1][:, None] - 1)
        return places_BT, is_label_BT


def count_samples(file: TokenFile, seq_len: int) -> int:
    """Return the number of samples of a file per epoch."""
    return sum(max(0, -(-(leaf.num_tokens - 1) // seq_len)) for leaf in file.leaves)


class _Joined:
    """Several arrays of ids, one after another, from which an array of places takes ids."""

    def __init__(self, maps: list[npt.NDArray[Any]]) -> None:
        self._maps, self._begins = maps, np.cumsum([0, *map(len, maps)])

    def __getitem__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        number = np.searchsorted(self._begins, places, side="right") - 1
        ids = np.empty(places.shape, dtype=np.int64)
        for leaf in np.unique(number):
            here = number == leaf
            ids[here] = self._maps[leaf][places[here] - self._begins[leaf]]
        return ids
