"""The two layers of PyTorch's tutorials, on numbers made by chance."""

import phalanx
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


def main(num_epochs: int = 3, num_rows: int = 200) -> nn.Module:
    run = phalanx.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(num_rows, 10), torch.randn(num_rows, 5))
    loader = DataLoader(data, batch_size=20)
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(*run.gather(model(x), y))
            run.backward(loss)
            optimizer.step()
        run.print(f"epoch {epoch}: loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    main()
