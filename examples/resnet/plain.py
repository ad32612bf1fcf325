"""A residual network with batch normalisation that reads handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

RESNET_50 = {"depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "embedding_size": 64}
SMALL = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 40], "embedding_size": 8}


def build(sizes: dict) -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10))


def load(num_rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Return images of digits, in three channels of `size` x `size` points."""
    digits = load_digits()
    images = torch.tensor(digits.images[:num_rows] / 16, dtype=torch.get_default_dtype())
    images = nn.functional.interpolate(images[:, None], size=(size, size), mode="bilinear")
    return images.expand(-1, 3, -1, -1), torch.tensor(digits.target[:num_rows])


def main(
    num_epochs: int = 1, num_rows: int = 256, size: int = 64, sizes: dict = RESNET_50
) -> nn.Module:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*load(num_rows, size)), batch_size=32)
    model = build(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(num_epochs):
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x).logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"batch {number}: loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    main()
