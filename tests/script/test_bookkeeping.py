"""The numbers that a loop keeps of its epochs are the plain script's, or an error says why not."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import NUM_ROWS, Numbers, perceptron
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.errors import ScriptError
from phalanx.launch.local import run_ranks
from phalanx.parallel import data, reduce
from phalanx.script.mean_loss import MeanLoss


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
        batches: list[tuple[Tensor, int]] = []
        for number, (x, y) in enumerate(loader):
            logits = model(x)
            loss = cross_entropy(logits, y)
            batches.append((loss, len(y)))
            if len(batches) == accumulation or number == len(loader) - 1:
                rows = sum(n for _, n in batches)
                optimizer.zero_grad()
                sum(each * n / rows for each, n in batches).backward()  # pyright: ignore
                optimizer.step()
                batches = []
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
            loss = cross_entropy(logits, y, reduction="sum")
            loss = run.backward(loss, len(y))
            if run.is_step_end:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() * loss.count
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


class Meter:
    """As that of torch's example for ImageNet."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: Any, n: int = 1) -> None:
        self.sum += value * n
        self.count += n


WEIGHED: list[Callable[[MeanLoss, Tensor], Any]] = [
    lambda loss, y: loss.item() * len(y),
    lambda loss, y: len(y) * loss.item(),
    lambda loss, y: loss * y.size(0),
    lambda loss, y: y.numel() * loss,
    lambda loss, y: loss.detach().cpu() * (y >= 0).sum(),
    lambda loss, y: loss.detach().item() * (y >= 0).sum(),
    lambda loss, y: loss.mul_(len(y)),
    lambda loss, y: torch.mul(loss.data, len(y)),
    lambda loss, y: torch.mul(input=loss, other=len(y)),
    lambda loss, y: copy.deepcopy(loss).float() * len(y),
    lambda loss, y: Meter().update(loss.item(), y.size(0)),
]
"""How loops weigh a mean by the rows at hand."""


def weighed_by_own_rows(strategy: str) -> list[str]:
    run = phalanx.init(strategy)
    model, optimizer, loader, _ = run.prepare(*parts())
    words: list[str] = []
    for x, y in loader:
        loss = run.backward(cross_entropy(model(x), y, reduction="sum"), len(y))
        optimizer.step()
        file = io.BytesIO()
        torch.save({"losses": [loss.item()], "loss": loss}, file)
        file.seek(0)
        assert torch.load(file) == {"losses": [float(loss)], "loss": float(loss)}
        for weigh in WEIGHED:
            try:
                words.append(f"passed: {weigh(loss, y)}")
            except ScriptError as error:
                words.append(str(error))
        for add_up in (run.sum, lambda value: run.mean(value, 1)):
            for value in (loss, loss.item()):
                try:
                    words.append(f"passed: {add_up(value)}")
                except ScriptError as error:
                    words.append(str(error))
        break
    return words


def test_a_mean_of_all_ranks_is_not_weighed_by_the_rows_of_one() -> None:
    for words in run_ranks(weighed_by_own_rows, 2, "dp2", threads=1):
        for each in words[: len(WEIGHED)]:
            assert re.search(
                r"the mean over the 9 samples \(or tokens\) of all ranks, and [45] is .*loss.count",
                each,
            ), each
        for each in words[len(WEIGHED) :]:
            assert re.search("is the mean over all ranks already", each), each


def test_on_one_rank_a_mean_is_weighed_as_in_plain_pytorch() -> None:
    assert all(
        each.startswith("passed") for each in run_ranks(weighed_by_own_rows, 1, "dp1")[0][:-4]
    )


def test_the_loss_is_a_number_in_every_other_way(tmp_path: Path) -> None:
    mean = torch.tensor(2.5, dtype=torch.float64)
    loss = MeanLoss.of(mean, mean, torch.tensor(16.0), (8,))
    assert (loss.count, loss.item(), float(loss), f"{loss:.2f}") == (16, 2.5, 2.5, "2.50")
    assert str(loss) == repr(loss) == str(mean)
    assert (loss * 16, loss.item() * 16, 0 + loss, loss.item() * 8.0) == (40, 40, 2.5, 20)
    assert float(loss) * 8 == 20
    assert loss > 2
    assert loss.item() < 3
    assert type(loss.item() + 1) is type(loss.item() * 16) is float
    assert type(loss + 1) is type(torch.stack([loss, loss]).mean()) is Tensor
    assert json.loads(json.dumps([loss.item()])) == [2.5]
    assert type(pickle.loads(pickle.dumps(loss.item()))) is float
    torch.save({"loss": loss, "best": loss.item()}, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", weights_only=False) == {"loss": mean, "best": 2.5}


def counted(way: str) -> list[str]:
    """Evaluate as a script does that was written for one process; return the warnings."""
    run = phalanx.init("dp2")
    model, optimizer, loader, held_back = run.prepare(*parts())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            right, loss, total = 0, None, 0.0
            for x, y in loader:
                logits = model(x)
                loss = run.backward(cross_entropy(logits, y, reduction="sum"), len(y))
                optimizer.step()
                total += float(loss) * len(y)
                right += int((logits.argmax(1) == y).sum())
            assert loss is not None
            if way == "training accuracy":
                run.print(right / len(loader.dataset))
            if way == "training floats":
                run.print(total / len(loader.dataset))
            if way == "epoch mean":
                run.print(loss.item() * loss.count / len(loader.dataset))
            if way.startswith("training"):
                continue
            with torch.no_grad():
                right = sum((model(x).argmax(1) == y).sum() for x, y in held_back)
            if way == "summed":
                right = run.sum(right)
            if way == "printed":
                run.print(right / len(held_back.dataset))
        if way == "training":
            run.print("done")
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("way", "num_warnings"), [
    ("training", 0), ("summed", 0), ("printed", 1), ("training accuracy", 1),
    by_hand("not printed", 1), by_hand("epoch mean", 1),
    by_hand("training floats", 1),
])  # fmt: skip
def test_numbers_that_are_not_added_up_are_told_once(way: str, num_warnings: int) -> None:
    first, other = run_ranks(counted, 2, way, threads=1)
    assert other == []
    assert len(first) == num_warnings, first
    for words in first:
        assert re.search(r"this rank has read (19|21) rows, and nothing was summed", words)


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    """Return a mean loss over a batch whose every row is compared with every other."""
    logits = z @ z.T / 0.5
    same = (y[:, None] == y[None]).double()
    return -(logits.log_softmax(1) * same).sum() / len(z)


def check_rows_of_unlike_lengths(run: phalanx.Run, num_rows: int) -> None:
    """Gather one row, while ranks without it have none of another length."""
    own = torch.ones(num_rows, 3 if num_rows else 5, requires_grad=True)
    rows = run.gather(own, grad=True)
    assert rows.shape == (1, 3)
    rows.sum().backward()
    assert own.grad is not None
    assert own.grad.shape == own.shape
    assert (own.grad == run.comm.size("data")).all()


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
        z = run.gather(model.tower(rows[2 * rank : 2 * rank + 2]), grad=True)
        head = model.a if rank else model.b
        run.backward(head(z).square().sum(), 2)
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
                z, labels, is_small = run.gather((model(x), y, y < 2), grad=True)
                assert torch.equal(is_small, labels < 2)
                if len(z) == 1:
                    check_rows_of_unlike_lengths(run, len(y))
                loss = run.backward(contrastive(z, labels) * len(y), len(y))
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["fsdp2", by_hand("dp2"), by_hand("dp3"), by_hand("fsdp3")])
def test_a_loss_over_the_whole_batch_is_that_of_one_process(strategy: str) -> None:
    expected = contrastive_losses(None)
    for found in run_ranks(contrastive_losses, int(strategy[-1]), strategy, threads=1):
        assert found == pytest.approx(expected, rel=1e-9)
