"""The batch that a backward of a loop uses, found from the order of reads and backwards alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.errors import ScriptError
from phalanx.script.loop_step import Reading


class Pass:
    """What `Reading` asks of a loader: passes of batches that are numbered from 1."""

    is_used = False
    stream_digest = ""

    def __init__(self, length: int) -> None:
        self.length, self.num_begun, self.batches_done = length, 1, 0
        self.is_last, self.rows = False, torch.zeros(1)

    def read(self) -> None:
        if self.is_last:
            self.num_begun, self.batches_done = self.num_begun + 1, 0
        self.batches_done += 1
        self.is_last = self.batches_done == self.length
        self.rows = torch.tensor([self.batches_done])


def used(calls: str, length: int = 5) -> list[int]:
    """Return the batch that each backward uses: see below."""
    # r reads, s reads and leaves out, b goes backward; e reads to evaluate, v so with gradients.
    loader: Any = Pass(length)
    other: Any = Pass(3)
    reading = Reading()
    found: list[int] = []
    held: list[torch.Tensor] = []
    for call in calls.replace(" ", ""):
        if call == "b":
            batch = reading.current
            assert batch is not None
            found.append(int(batch.rows) * (-1 if reading.is_pass_over() else 1))
            reading.use(is_step_end=True)
            continue
        each = loader if call in "rs" else other
        each.read()
        batch = torch.zeros(1)
        held.extend([batch] if call == "r" else [])
        with torch.set_grad_enabled(call in "rsv"):
            reading.note(each, {"x": batch})
        del batch
        if each is other and other.is_last:
            other.batches_done = 0  # the loop over it has ended
    return found


@pytest.mark.parametrize(("calls", "expected"), [
    ("rb rb rb rb rb rb", [1, 2, 3, 4, -5, 1]),
    ("rbb rbb rb rb rbb", [1, 1, 2, 2, 3, 4, -5, 5]),  # a generator and a discriminator
    ("rrr bbb rr bb rrr b", [1, 2, 3, 4, -5, 1]),  # a step's batches are read together
    ("rrrrr bbbbb rrrrr bbbbb", [1, 2, 3, 4, -5] * 2),
    ("rrb rb rb rb b rrb", [1, 2, 3, 4, -5, 1]),  # one batch is read ahead
    ("rb rrb rrb rrb", [1, 3, -5, 2]),  # batches 2, 4 and 1 are left out
    ("ssr b rb rb", [3, 4, -5]),  # the first two are left out
    ("sr b rb rb rb", [2, 3, 4, -5]),
    ("rrr b rb rb b b", [1, 2, 3, 4, -5]),  # two batches are read ahead
    ("rb eee rb eee rb rb rb", [1, 2, 3, 4, -5]),
    ("rb vvv rb rb rb vvv rb", [1, 2, 3, 4, -5]),  # without torch.no_grad()
])  # fmt: skip
def test_reads_and_backwards_show_the_batch(calls: str, expected: list[int]) -> None:
    assert used(calls) == expected


def test_a_pass_that_begins_within_a_step_is_refused() -> None:
    loader: Any = Pass(2)
    reading = Reading()
    for number in range(3):
        loader.read()
        reading.note(loader, None)
        if number < 2:
            reading.is_pass_over()
            reading.use(is_step_end=False)
    with pytest.raises(ScriptError, match="a pass over the loader begins within a step"):
        reading.is_pass_over()
    reading.forget_step()
    assert not reading.is_pass_over()
