"""Scripts that differ by their model."""

from __future__ import annotations

import torch
from plain_adapters import Plain
from plain_loop import Script, perceptron_loop, step, sum_of_losses
from plain_models import (
    Boxes,
    Branched,
    Graph,
    LoRA,
    Named,
    Scaled,
    Shared,
    Tables,
    UNet,
    ViT,
    as_lists,
    mlp,
    rows_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def lora(on: Plain) -> None:
    model = nn.Sequential(
        LoRA(nn.Linear(6, 10)), nn.Tanh(), LoRA(nn.Linear(10, 10)), nn.Tanh(), nn.Linear(10, 5)
    ).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    perceptron_loop(on, model, torch.optim.AdamW(trained, 0.02), max_norm=0.5)


def learned_scale(on: Plain) -> None:
    model = Scaled()
    perceptron_loop(on, model, torch.optim.AdamW(model.parameters(), 0.02), max_norm=0.5)


def sparse_embeddings(on: Plain) -> None:
    model = Tables()
    sparse = torch.optim.SparseAdam(model.table.parameters(), 0.05)
    dense = torch.optim.Adam(model.rest.parameters(), 0.05)
    model, sparse, dense, loader = on.prepare(model, sparse, dense, DataLoader(rows_of(6), 6))
    for _ in range(2):
        for x, y in loader:
            sparse.zero_grad()
            dense.zero_grad()
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            sparse.step()
            dense.step()


def branches_with_batch_norm(on: Plain) -> None:
    model = Branched().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(rows_of(6), 7)
    model, optimizer, loader = on.prepare(model, optimizer, loader, batch_norm="global")
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x, y), y), len(y)))
        step(optimizer)


def unfrozen_in_the_middle(on: Plain) -> None:
    model = mlp(6, 10, 8, 5)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for epoch in range(3):
        model[0].requires_grad_(epoch > 0)
        for x, y in loader:
            optimizer.zero_grad()
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            on.print(on.clip(model, 0.5))
            optimizer.step()


def normalized_weights(on: Plain) -> None:
    """Weights that are computed of others: weight norm and spectral norm."""
    model = mlp(6, 10, 10, 5)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    perceptron_loop(on, model, torch.optim.SGD(model.parameters(), 0.1))


def u_net(on: Plain) -> None:
    model = UNet().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(1, 8, 8), 8))
    for x, _ in loader:
        loss = F.binary_cross_entropy_with_logits(model(x), (x > 0.3).double(), reduction="none")
        on.print(on.backward(loss.mean((1, 2, 3)).sum(), len(x)))
        step(optimizer)


def vit(on: Plain) -> None:
    model = ViT().double()
    loader = DataLoader(rows_of(1, 8, 8), 9, shuffle=True)
    perceptron_loop(on, model, torch.optim.AdamW(model.parameters(), 0.01), loader=loader)


def detection(on: Plain) -> None:
    model = mlp(6, 10, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    loader = DataLoader(Boxes(), 5, shuffle=True, collate_fn=as_lists)
    model, optimizer, loader = on.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, boxes in loader:
            centers = model(x)
            losses = [(c - b).abs().sum() for c, b in zip(centers, boxes, strict=True)]
            loss = torch.stack([centers.sum() * 0, *losses]).sum()
            on.print(on.backward(loss, sum(map(len, boxes))))
            step(optimizer)


def graph(on: Plain) -> None:
    """A graph network over all nodes, and a loss over some of them at a time."""
    model = Graph().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02, weight_decay=5e-4)
    x, y = rows_of(6).tensors
    edges = torch.stack([torch.arange(37), (torch.arange(37) * 3 + 1) % 37])
    shares = torch.ones(37).double() / 2
    links = torch.sparse_coo_tensor(edges, shares, (37, 37), check_invariants=True).coalesce()
    nodes = DataLoader(TensorDataset(torch.arange(30)), 8, shuffle=True)
    model, optimizer, nodes = on.prepare(model, optimizer, nodes)
    for _ in range(3):
        for (some,) in nodes:
            optimizer.zero_grad()
            logits = model(x, links)
            on.print(on.backward(sum_of_losses(logits[some], y[some]), len(some)))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        is_right = model(x, links).argmax(1) == y  # every rank has all nodes
    on.print(is_right[30:].double().mean())


def named_outputs(on: Plain) -> None:
    model = Named().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for x, y in loader:
        out = model(x)
        loss = sum_of_losses(out.logits, y) + 0.01 * out.features.square().mean(1).sum()
        on.print(on.backward(loss, len(y)))
        step(optimizer)


def shared_modules(on: Plain) -> None:
    """A block that runs three times, and has two names."""
    model = Shared().double()
    on.print(sum(p.numel() for p in model.parameters()))
    perceptron_loop(on, model, torch.optim.AdamW(model.parameters(), 0.02), max_norm=1.0)


SCRIPTS: dict[str, Script] = {
    "sparse embeddings": sparse_embeddings,
    "learned scale": learned_scale,
    "LoRA": lora,
    "U-Net": u_net,
    "ViT": vit,
    "detection": detection,
    "normalized weights": normalized_weights,
    "unfrozen in the middle": unfrozen_in_the_middle,
    "branches with batch norm": branches_with_batch_norm,
    "graph": graph,
    "named outputs": named_outputs,
    "shared modules": shared_modules,
}
