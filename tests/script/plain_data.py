"""Scripts that differ by what they read."""

from __future__ import annotations

from typing import Any

import torch
from plain_adapters import Plain
from plain_loop import Script, perceptron_loop, step, sum_of_losses
from plain_models import Residual, Stream, mlp, rows_of
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split


def two_loaders(on: Plain) -> None:
    """Labelled and other rows, read side by side."""
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, labelled, others = on.prepare(
        model, optimizer, DataLoader(rows_of(6), 8), DataLoader(rows_of(6, num_rows=50), 8)
    )
    for (x, y), (other, _) in zip(labelled, others, strict=False):
        logits = model(torch.cat([x, other]))
        entropy = -(logits[len(x) :].softmax(1) * logits[len(x) :].log_softmax(1)).sum()
        # Means of unlike numbers of rows: each is summed over all rows of its own.
        on.print(on.backward(sum_of_losses(logits[: len(x)], y) + 0.1 * entropy, len(y)))
        step(optimizer)


def weighted_rows(on: Plain) -> None:
    model = mlp(6, 10, 5)
    sampler = WeightedRandomSampler(range(1, 38), 30)
    loader = DataLoader(rows_of(6), 8, sampler=sampler)
    perceptron_loop(on, model, torch.optim.Adadelta(model.parameters()), loader=loader)


def stream(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.Adamax(model.parameters(), 0.02)
    perceptron_loop(on, model, optimizer, loader=DataLoader(Stream(), 8))


def curriculum(on: Plain) -> None:
    """Larger batches of more rows, phase by phase."""
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    model, optimizer = on.prepare(model, optimizer)
    for num_rows, batch_size in ((12, 4), (24, 6), (37, 12)):
        some = Subset(rows_of(6), range(num_rows))
        loader = on.prepare(DataLoader(some, batch_size, shuffle=True))
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)


def folds(on: Plain) -> None:
    """Cross-validation: a model for each fold, and the mean of their accuracies."""
    scores: list[float] = []
    data = rows_of(6)
    for fold in range(3):
        on.begin()
        held = [index for index in range(37) if index % 3 == fold]
        rest = [index for index in range(37) if index % 3 != fold]
        model = mlp(6, 10, 5)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        model, optimizer, loader, held_back = on.prepare(
            model,
            optimizer,
            DataLoader(Subset(data, rest), 8, shuffle=True),
            DataLoader(Subset(data, held), 8),
        )
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
        right = torch.tensor(0)
        with torch.no_grad():
            for x, y in held_back:
                right = right + (model(x).argmax(1) == y).sum()
        scores.append(float(on.sum(right)) / len(held))
        on.print(scores[-1])
    on.print(sum(scores) / len(scores))


def split_at_random(on: Plain) -> None:
    """A part held back at random, two datasets in one, and the last batch left out."""
    both = ConcatDataset([rows_of(6), rows_of(6, num_rows=11)])
    rest, held = random_split(both, [0.8, 0.2])
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(rest, 8, shuffle=True, drop_last=True)
    model, optimizer, loader, held_back = on.prepare(model, optimizer, loader, DataLoader(held, 4))
    on.print(len(loader), len(held_back), len(loader.dataset))
    for _ in range(2):
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)
        with torch.no_grad():
            losses: Any = [sum_of_losses(model(x), y) for x, y in held_back]
        on.print(on.sum(torch.stack(losses).sum()) / len(held))


def accumulated(on: Plain) -> None:
    """Two batches for each step."""
    on.begin(accumulation=2)
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    loader = DataLoader(rows_of(6), 6, shuffle=True, drop_last=True)
    model, optimizer, loader = on.prepare(model, optimizer, loader)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            if (number + 1) % 2 == 0:
                on.print(on.clip(model, 0.5))
                optimizer.step()
                optimizer.zero_grad()


SCRIPTS: dict[str, Script] = {
    "stream": stream,
    "two loaders": two_loaders,
    "weighted rows": weighted_rows,
    "curriculum": curriculum,
    "folds": folds,
    "split at random": split_at_random,
    "accumulated": accumulated,
}
