"""Counts of a block and a head on the meta device: the chunks of a loss that are left out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.account.count import BlockBytes, Case, count
from phalanx.models import loss
from phalanx.models.registry import shape_of
from phalanx.parallel.tensor import loss as split_loss
from phalanx.strategy import Strategy

SHAPE = dataclasses.replace(shape_of("demo"), num_layers=1, vocab_size=1 << 17, max_seq_len=1 << 14)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def case(text: str, num_rows: int, device: Any = "cuda") -> Case:
    strategy = Strategy.parse(text)
    return Case(SHAPE, strategy, 2049, num_rows, "bfloat16", device)


def counted(of: Case) -> tuple[BlockBytes, int]:
    """Return the count of a case, and the operators that it took."""
    with Operators() as operators:
        found = count.__wrapped__(of)
    return found, operators.num


TEXTS = ("dp1", "tp2", "tp4:2d", "cp2")


@pytest.mark.parametrize("text", TEXTS)
def test_the_chunks_that_are_left_out_hold_no_more(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, num_few = counted(case(text, 8))
    for module in (loss, split_loss):
        monkeypatch.setattr(
            module, "chunk_starts", lambda x, num_rows: [*range(0, len(x), num_rows)]
        )
    every, num_every = counted(case(text, 8))
    assert few == every and num_few < num_every


@pytest.mark.parametrize("text", TEXTS)
def test_a_larger_microbatch_takes_no_more_operators(text: str) -> None:
    nums = [counted(case(text, num_rows))[1] for num_rows in (8, 16)]
    assert nums[0] == nums[1] < 2000
