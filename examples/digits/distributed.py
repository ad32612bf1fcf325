"""A small convolutional network that reads handwritten digits."""

import phalanx
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main(num_epochs: int = 5, num_rows: int = 1497) -> nn.Module:
    run = phalanx.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:num_rows], labels[:num_rows]), 64, shuffle=True)
    held_back = DataLoader(TensorDataset(images[-300:], labels[-300:]), batch_size=64)
    model = build()
    loader, held_back = run.prepare(loader, held_back)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            phalanx.average_gradients(model, len(y))
            optimizer.step()
        with torch.no_grad():
            right = run.sum(sum((model(x).argmax(1) == y).sum() for x, y in held_back))
        run.print(f"epoch {epoch}: {right} of 300 digits that were held back are read right")
    return model


if __name__ == "__main__":
    main()
