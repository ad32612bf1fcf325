"""The traces of generation: what slots and blocks hold, and the figures beside them."""

from __future__ import annotations

import re

from phalanx.report.tabular import Table
from phalanx.show.generation import (
    LENGTHS,
    ShowGeneration,
    show_paged_attention,
    show_rolling_batch,
)


def test_each_request_has_one_slot_for_as_many_steps_as_tokens() -> None:
    shown = show_rolling_batch(ShowGeneration())
    static, rolling = [part for part in shown.parts if isinstance(part, Table)]
    for grid in (static, rolling):
        rows = [row[1].split() for row in grid.rows]
        for number, length in enumerate(LENGTHS):
            held = [row for row in rows if chr(65 + number) in row]
            assert len(held) == 1 and held[0].count(chr(65 + number)) == length
        num_steps = len(rows[0])
        busy = sum(LENGTHS) / (3 * num_steps)
        assert f"{num_steps} steps, {busy:.0%} of the slots" in grid.title
    # The three longest of the batches of three: 9, 8 and 3.
    assert "static: 20 steps" in static.title and "rolling: 12 steps" in rolling.title


def test_two_sequences_share_the_blocks_of_their_begin() -> None:
    shown = show_paged_attention(ShowGeneration())
    tables, blocks = [part for part in shown.parts if isinstance(part, Table)]
    (_, _, found_a, a), (_, _, found_b, b) = tables.rows
    a, b = a.split(", "), b.split(", ")
    assert a[:2] == b[:2] and not set(a[2:]) & set(b[2:]) and (found_a, found_b) == ("0", "8")
    assert [row[1] for row in blocks.rows].count("A, B") == 2
    used = sum(token != "-" for row in blocks.rows for token in row[3].split())
    held = 4 * len(blocks.rows)
    said = str(shown.parts[-1])
    assert re.search(
        rf"{held} positions, of which {used} hold a token: {1 - used / held:.0%}", said
    )
