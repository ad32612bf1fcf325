"""A perceptron that learns a function of eight numbers."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(num_epochs: int = 3, num_rows: int = 1000) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(num_rows, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, targets), 64 // accelerator.num_processes, True)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(num_epochs):
        total = 0.0
        for x, y in loader:
            out = model(x)
            loss = nn.functional.mse_loss(out, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += accelerator.reduce(loss.detach() * len(y)).item()
        accelerator.print(f"epoch {epoch}: loss {total / num_rows:.4f}")
    return model


if __name__ == "__main__":
    main()
