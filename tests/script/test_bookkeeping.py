"""The numbers that a loop keeps of its epochs are the plain script's, or an error says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import NUM_ROWS, Numbers, perceptron
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.launch.local import run_ranks
from phalanx.parallel import data, reduce


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], DataLoader[Any]]:
    torch.manual_seed(3)
    model = perceptron().double()
    loader = DataLoader(Numbers(), 9, shuffle=True)  # the last batch has one row
    return model, torch.optim.Adam(model.parameters(), 0.01), loader, DataLoader(Numbers(), 8)


def plain_numbers(accumulation: int = 1) -> list[float]:
    """Return the mean losses of an epoch, its accuracy, and loss and accuracy of a validation."""
    model, optimizer, loader, held_back = parts()
    numbers: list[float] = []
    for _ in range(2):
        total, of_batches, right, count = 0.0, 0.0, 0, 0
        for number, (x, y) in enumerate(loader):
            logits = model(x)
            loss = cross_entropy(logits, y)
            (loss / accumulation).backward()
            if (number + 1) % accumulation == 0 or number == len(loader) - 1:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() * len(y)
            of_batches += loss.item()
            right += int((logits.argmax(1) == y).sum())
        numbers += [total / len(loader.dataset), of_batches / len(loader), right / NUM_ROWS]
        total, right = 0.0, 0
        with torch.no_grad():
            for x, y in held_back:
                logits = model(x)
                total += cross_entropy(logits, y, reduction="sum").item()
                right += int((logits.argmax(1) == y).sum())
                count += len(y)
        numbers += [total / count, right / len(held_back.dataset)]
    return numbers


def numbers_of_ranks(strategy: str, accumulation: int) -> list[float]:
    """Return what `plain_numbers` does."""
    run = phalanx.init(strategy, accumulation=accumulation)
    model, optimizer, loader, held_back = run.prepare(*parts())
    numbers: list[float] = []
    for _ in range(2):
        total, of_batches, right, count = 0.0, 0.0, 0, 0
        for x, y in loader:
            logits = model(x)
            loss = cross_entropy(logits, y)
            loss = run.backward(mean_of_rows=loss / accumulation, count=len(y)) * accumulation
            if run.is_step_end:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() * int(run.sum(len(y)))
            of_batches += loss.item()
            right += int((logits.argmax(1) == y).sum())
        right = run.sum(right).item()
        numbers += [total / len(loader.dataset), of_batches / len(loader), right / NUM_ROWS]
        total, right = 0.0, 0
        with torch.no_grad():
            for x, y in held_back:
                logits = model(x)
                total += cross_entropy(logits, y, reduction="sum").item()
                right += int((logits.argmax(1) == y).sum())
                count += len(y)
        right = run.sum(right).item()
        numbers += [run.mean(total, count).item(), right / len(held_back.dataset)]
    return numbers


@pytest.mark.parametrize(("strategy", "accumulation"), [
    ("dp2", 1), ("fsdp2", 2), by_hand("dp2", 2), by_hand("fsdp2", 1), by_hand("dp3", 3),
])  # fmt: skip
def test_an_epoch_has_the_numbers_of_the_plain_script(strategy: str, accumulation: int) -> None:
    num_ranks = int(strategy[-1])
    for found in run_ranks(numbers_of_ranks, num_ranks, strategy, accumulation, threads=1):
        assert found == pytest.approx(plain_numbers(accumulation), rel=1e-9)


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    """Return a mean loss over a batch whose every row is compared with every other."""
    logits = z @ z.T / 0.5
    same = (y[:, None] == y[None]).double()
    return -(logits.log_softmax(1) * same).sum() / len(z)


def check_rows_of_unlike_lengths(run: phalanx.Run, num_rows: int) -> None:
    """Gather one row, while ranks without it have none of another length."""
    own = torch.ones(num_rows, 3 if num_rows else 5, requires_grad=True)
    rows = run.gather(own)
    assert rows.shape == (1, 3)
    rows.sum().backward()
    assert own.grad is not None
    assert own.grad.shape == own.shape
    assert (own.grad == 1).all()


class Heads(nn.Module):
    """A tower, and two heads on the gathered rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.a, self.b = (nn.Linear(4, 4, bias=False).double() for _ in range(3))


def gradients_of_heads(strategy: str | None) -> list[Tensor]:
    """Return the gradients of two losses on the same rows; on ranks each has one of them.

    The last head's gradient has the size of the gathered rows. It is ready, and its sum begins,
    before backward reaches the rows on the rank that uses this head, and after it on the other.
    """
    model = Heads()
    rows = torch.arange(16.0, dtype=torch.float64).view(4, 4)
    if strategy is None:
        z = model.tower(rows)
        ((model.a(z).square().sum() + model.b(z).square().sum()) / 4).backward()
    else:
        data.buckets = lambda sizes, bucket_bytes: reduce.buckets(sizes, 1)
        run = phalanx.init(strategy)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        rank = run.comm.coord("dp")
        z = run.gather(model.tower(rows[2 * rank : 2 * rank + 2]))
        head = model.a if rank else model.b
        run.backward(sum_of_rows=head(z).square().sum(), count=2)
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_sums_of_gathered_rows_and_of_gradients_have_no_common_order() -> None:
    expected = gradients_of_heads(None)
    for found in run_ranks(gradients_of_heads, 2, "dp2", threads=1):
        torch.testing.assert_close(found, expected)


def contrastive_losses(strategy: str | None) -> list[float]:
    """Return the losses of two epochs, in plain PyTorch if there is no strategy."""
    model, optimizer, loader, _ = parts()
    run = None if strategy is None else phalanx.init(strategy)
    if run is not None:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses: list[float] = []
    for _ in range(2):
        for x, y in loader:
            if run is None:
                loss = contrastive(model(x), y)
                optimizer.zero_grad()
                loss.backward()
            else:
                optimizer.zero_grad()
                z, labels, is_small = run.gather(model(x), y, y < 2)
                assert torch.equal(is_small, labels < 2)
                if len(z) == 1:
                    check_rows_of_unlike_lengths(run, len(y))
                loss = run.backward(contrastive(z, labels))
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["fsdp2", by_hand("dp2"), by_hand("dp3"), by_hand("fsdp3")])
def test_a_loss_over_the_whole_batch_is_that_of_one_process(strategy: str) -> None:
    expected = contrastive_losses(None)
    for found in run_ranks(contrastive_losses, int(strategy[-1]), strategy, threads=1):
        assert found == pytest.approx(expected, rel=1e-9)
