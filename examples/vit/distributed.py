"""A small vision transformer that reads handwritten digits."""

import phalanx
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification


def build() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(intermediate_size=64, **sizes, **image, **drops))


@torch.no_grad()
def count_right(model: nn.Module, loader: DataLoader) -> Tensor:
    return sum((model(x).logits.argmax(1) == y).sum() for x, y in loader)


def main(num_epochs: int = 5, num_rows: int = 1497) -> nn.Module:
    run = phalanx.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:num_rows], labels[:num_rows]), 64, shuffle=True)
    held_back = DataLoader(TensorDataset(images[-300:], labels[-300:]), batch_size=64)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader, held_back = run.prepare(model, optimizer, loader, held_back)
    for epoch in range(num_epochs):
        for x, y in loader:
            loss = model(x, labels=y).loss
            run.backward(mean_of_rows=loss, count=len(y))
            optimizer.step()
            optimizer.zero_grad()
        right = run.sum(count_right(model, held_back))
        run.print(f"epoch {epoch}: {right} of 300 digits that were held back are read right")
    return model


if __name__ == "__main__":
    main()
