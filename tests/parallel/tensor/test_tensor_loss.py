"""The loss over a vocabulary that ranks share, beside that of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from parts import B, Cut, T, gap

from marks import by_hand
from phalanx.launch.local import run_ranks
from phalanx.models import loss as models_loss
from phalanx.models.loss import IGNORE
from phalanx.parallel.tensor.loss import token_loss_sum
from phalanx.strategy import Strategy

TYPES = {torch.float64: (1e-14, 1e-15), torch.bfloat16: (1e-6, 2**-9)}
"""Errors of the loss and of a gradient of at most 0.37, which bfloat16 rounds to 2**-10."""


def split_loss(text: str, num_ids: int) -> int:
    """Compare, on this rank; return the number of ids that are its own."""
    cut = Cut(text)
    num_mine = 0
    for dtype, share in itertools.product(TYPES, (0.3, 1.0)):
        logits = (20 * cut.random(B, T, num_ids)).to(dtype)
        generator = torch.Generator().manual_seed(cut.copy)
        labels = torch.randint(num_ids, (B, T), generator=generator)
        labels[torch.rand(B, T, generator=generator) < share] = IGNORE
        alone = logits.clone().requires_grad_()
        expected = models_loss.token_loss_sum(
            alone.flatten(0, 1), torch.eye(num_ids, dtype=dtype), labels.flatten()
        )
        (0.37 * expected).backward()
        part = cut.activation(logits, cut.inner).requires_grad_()
        mine = cut.layout.labels_of(labels, IGNORE).flatten()
        loss = token_loss_sum(part.flatten(0, 1).clone(), mine, num_ids, cut.layout)
        (0.37 * loss).backward()
        assert part.grad is not None and alone.grad is not None and part.grad.dtype == dtype
        of_loss, of_gradient = TYPES[dtype]
        assert loss.dtype == expected.dtype
        assert loss.item() == pytest.approx(expected.item(), rel=of_loss)
        assert gap(part.grad, cut.activation(alone.grad, cut.inner)) <= of_gradient
        if share == 1.0:
            assert loss.item() == 0.0 and not part.grad.any()
        else:
            assert loss.item() > 0 or num_ids == 1
        num_mine = part.shape[2]
    return num_mine


@pytest.mark.parametrize(
    "text, num_ids, num_empty",
    [
        by_hand("dp2,tp3", 67, 0),
        ("tp4", 5, 1),  # parts of 2, 2, 1 and 0 ids
        by_hand("tp5", 3, 2),
        by_hand("dp2,tp4:2d", 67, 0),
        ("tp4:2d", 1, 2),
        by_hand("tp8:2.5d/2", 67, 0),
        by_hand("tp8:3d", 67, 0),
    ],
)
def test_the_split_loss_is_that_of_one_process(text: str, num_ids: int, num_empty: int) -> None:
    """In float64 and bfloat16, with labels and without any."""
    parts = run_ranks(split_loss, Strategy.parse(text).num_ranks, text, num_ids, threads=1)
    assert parts.count(0) == num_empty


def scale_twice() -> str:
    cut = Cut("tp2")
    logits = cut.random(4, 3).requires_grad_()
    labels = torch.zeros(4, dtype=torch.int64)
    loss = token_loss_sum(logits.clone(), labels, 5 + 1, cut.layout)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call forward again") as error:
        loss.backward()
    return str(error.value)


def test_the_gradient_is_given_once() -> None:
    assert all(run_ranks(scale_twice, 2))
