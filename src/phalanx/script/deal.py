"""Distribution of the rows of a global batch over the data ranks: pure functions.

A batch is cut into pieces (one, or the microbatches of a step), each piece into one range per rank:

                           on 2 ranks              on 3 ranks
    7 rows, 2 pieces    0  1  2  3 | 4  5  6    0  1  2  3 | 4  5  6
    rank 0              0  1       | 4  5       0  1       | 4
    rank 1                    2  3 |       6          2    |    5
    rank 2                                               3 |       6

So a piece has the same rows, over all ranks, as on one process, and a sum over a piece is equal for
any number of ranks. The first pieces and the first ranks have the larger parts.

Under the proof of a script's own loop, the second batch of a loader is dealt unevenly, as 9 + 7
rows rather than 8 + 8, if a later batch of the pass is uneven: so the first steps show what goes
wrong there. A loop that carries a state of each row to the next batch has no uneven batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from phalanx.errors import ConfigError


class PlaceholderMicrobatch(NamedTuple):
    """A microbatch that counts as 0 rows, for a rank without rows where other ranks have some.

    All ranks run forward and backward of a microbatch together, and many models fail on a batch of
    0 rows, such as all models of transformers that reshape it.
    """

    rows: Any


def shard_rows(
    rows: range, rank: int, num_ranks: int, num_pieces: int, *, is_uneven: bool = False
) -> list[range]:
    """Return the rows of each piece of a batch that `rank` takes.

    If `is_uneven`, the first rank takes a sixteenth of the last rank's rows, at least one, of a
    batch in one piece in which every rank has two rows.
    """
    if is_uneven and num_pieces == 1 and num_ranks > 1 and len(rows) >= 2 * num_ranks:
        moved = max(1, len(rows) // num_ranks // 16)
        ends = [_part(rows, number, num_ranks).stop + moved for number in range(num_ranks - 1)]
        return [range([rows.start, *ends][rank], [*ends, rows.stop][rank])]
    pieces = [_part(rows, number, num_pieces) for number in range(num_pieces)]
    return [_part(piece, rank, num_ranks) for piece in pieces]


def _part(rows: range, number: int, num_parts: int) -> range:
    """Return part `number` of `num_parts` parts of nearly equal size, larger parts first."""
    least, more = divmod(len(rows), num_parts)
    first = number * least + min(number, more)
    return rows[first : first + least + (number < more)]


def without_rows(batch: Any) -> Any:
    """Return a batch of one row with that row removed."""
    if isinstance(batch, Tensor) and batch.ndim and len(batch) == 1:
        return batch[:0]
    if batch is None:
        return None
    if isinstance(batch, list | tuple) and batch:
        parts = cast("Sequence[Any]", batch)
        if len(parts) == 1 and isinstance(parts[0], str | int | float):  # the value of the one row
            return []
        # A named tuple is built from separate arguments.
        cut = [without_rows(part) for part in parts]
        return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)
    if isinstance(batch, Mapping):
        return {key: without_rows(part) for key, part in cast("Mapping[Any, Any]", batch).items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = {f.name: without_rows(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **parts)
    what = f"a tensor of shape {list(batch.shape)}" if isinstance(batch, Tensor) else repr(batch)
    raise ConfigError(
        f"a rank has no row of the last batch, and a batch of one sample contains {what}, in which "
        "the row cannot be identified; make collate_fn put samples in the first dimension, or set "
        "drop_last=True"
    )
