"""Cut this rank's rows of each global batch into the microbatches of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.data.rows import count_rows, take_rows
from phalanx.script.deal import PlaceholderMicrobatch
from phalanx.script.loader import RankLoader
from phalanx.strategy import Strategy


def words_of_few(strategy: Strategy, accumulation: int) -> list[str]:
    """Return a line of advice if a step has fewer microbatches than the degree of pp."""
    degree = strategy.pp.degree
    if accumulation >= degree:
        return []
    return [
        f"accumulation is {accumulation}, so that ranks of pp{degree} without a microbatch wait "
        f"for the others; with accumulation={2 * degree} they wait less"
    ]


class Microbatches:
    """Cuts a loader's batches; with `has_spares`, placeholders replace empty microbatches."""

    def __init__(
        self, loader: RankLoader, accumulation: int, num_data_ranks: int, *, has_spares: bool
    ) -> None:
        self._loader = loader
        self._accumulation = accumulation
        self._num_data_ranks = num_data_ranks
        self._has_spares = has_spares

    def cut(self, batch: Any) -> list[Any]:
        """Return this rank's microbatches of a batch, without those that no rank has rows of."""
        loader = self._loader
        num_shards = self._num_data_ranks if len(loader.piece_sizes) == 1 else 1
        most = -(-loader.num_batch_rows // num_shards)  # microbatches with rows on some rank
        if loader.has_no_rows and self._has_spares:
            return [PlaceholderMicrobatch(batch)] * min(self._accumulation, most)
        if self._accumulation == 1:
            return [batch]
        pieces = self._pieces(count_rows(batch))
        return [self._piece(batch, rows) for rows in pieces[:most]]

    def whole(self, batch: Any) -> Any:
        """Return a whole batch for an evaluation; a placeholder if this rank has no rows."""
        return (
            PlaceholderMicrobatch(batch) if self._loader.has_no_rows and self._has_spares else batch
        )

    def rows(self) -> Sequence[Tensor]:
        """Return the row positions of each microbatch of the last batch, see `RankLoader.rows`."""
        rows = self._loader.rows
        return [rows[piece] for piece in self._pieces(len(rows))]

    def _piece(self, batch: Any, rows: slice) -> Any:
        if rows.stop > rows.start or not self._has_spares:
            return take_rows(batch, rows)
        return PlaceholderMicrobatch(take_rows(batch, slice(1)))

    def _pieces(self, num_rows: int) -> list[slice]:
        """Return the slice of each microbatch in this rank's rows of a batch."""
        sizes = self._loader.piece_sizes
        if len(sizes) <= 1:
            least, more = divmod(num_rows, self._accumulation)
            sizes = [least + (number < more) for number in range(self._accumulation)]
        ends = list(itertools.accumulate(sizes, initial=0))
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
