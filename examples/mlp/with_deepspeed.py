"""A perceptron that learns a function of eight numbers."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(num_epochs: int = 3, num_rows: int = 1000) -> nn.Module:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    inputs = torch.randn(num_rows, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    data = TensorDataset(inputs, targets)
    num_ranks = torch.distributed.get_world_size()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // num_ranks, sampler=sampler)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    config = {"train_batch_size": 64, "zero_allow_untested_optimizer": True}
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for epoch in range(num_epochs):
        total = torch.zeros((), device=model.device)
        sampler.set_epoch(epoch)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.mse_loss(out, y)
            model.backward(loss)
            model.step()
            total += loss.detach() * len(y)
        torch.distributed.all_reduce(total)
        if torch.distributed.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / num_rows:.4f}")
    return model


if __name__ == "__main__":
    main()
