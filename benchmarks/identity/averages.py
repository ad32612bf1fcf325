"""A loop of plain PyTorch that averages its gradients, without `phalanx.init`.

phalanx run benchmarks/identity/averages.py --strategy dp2 -- OUT.json by=call|by=optimizer
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import phalanx
from job import data, optimizer, without_norms
from loop import digest


def main(out: str, by: str) -> None:
    """Take ten steps on uneven parts of the data: rank 0 has every third row, rank 1 the rest."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    net = without_norms().eval()
    opt = optimizer(net.parameters())
    if by == "by=optimizer":
        opt = phalanx.DistributedOptimizer(opt)
    inputs, labels = data()[:]
    own = torch.arange(len(labels)) % 3 == 0
    own = own if rank == 0 else ~own
    x, y = (inputs, labels) if size == 1 else (inputs[own], labels[own])
    losses = []
    for step in range(10):
        part = slice(4 * step, 4 * step + 9)
        loss = cross_entropy(net(x[part]), y[part])
        loss.backward()
        if by == "by=call":
            phalanx.average_gradients(net, len(y[part]))
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    if rank == 0:
        Path(out).write_text(json.dumps({"loss": losses, "weights": digest(net.state_dict())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
