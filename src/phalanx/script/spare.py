"""A row that a rank computes where other ranks have rows and it has none.

All ranks run forward and backward of a microbatch together, and a batch may have fewer rows than
there are ranks. Many models take no batch of no rows, such as all of transformers that reshape it.
So such a rank computes one row, which counts nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Spare(NamedTuple):
    """A microbatch whose rows count nothing.

    Attributes:
        rows: at least one.
    """

    rows: Any
