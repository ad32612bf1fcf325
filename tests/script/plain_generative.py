"""Scripts of generative models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from plain_adapters import Plain
from plain_loop import Script, step
from plain_models import VAE, Autoencoder, Pair, mlp, rows_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


def wgan_gp(norm: Callable[[], nn.Module], on: Plain, **options: Any) -> None:
    d = nn.Sequential(nn.Linear(6, 10), norm(), nn.Tanh(), nn.Linear(10, 1))
    both = Pair(mlp(6, 10, 6), d).double()
    of_g = torch.optim.SGD(both.g.parameters(), 0.1)
    of_d = torch.optim.SGD(both.d.parameters(), 0.1)
    loader = DataLoader(rows_of(6), 8)
    both, of_g, of_d, loader = on.prepare(both, of_g, of_d, loader, **options)
    for x, _ in loader:
        made = both("g", x.flip(1))
        between = (0.3 * x + 0.7 * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(both("d", between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().sum()
        loss = both("d", made.detach()).sum() - both("d", x).sum() + 10 * penalty
        of_d.zero_grad()
        on.print(on.backward(loss, len(x)))
        of_d.step()
        of_g.zero_grad()
        on.print(on.backward(-both("d", made).sum(), len(x)))
        of_g.step()


def gan(on: Plain) -> None:
    """Freeze the discriminator while the generator learns."""
    both = Pair(mlp(3, 8, 6), mlp(6, 8, 1))
    of_g = torch.optim.Adam(both.g.parameters(), 0.02, betas=(0.5, 0.99))
    of_d = torch.optim.Adam(both.d.parameters(), 0.02, betas=(0.5, 0.99))
    both, of_g, of_d, loader = on.prepare(both, of_g, of_d, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        for x, _ in loader:
            made = both("g", x[:, :3])
            wrong = F.softplus(both("d", made.detach())) + F.softplus(-both("d", x))
            of_d.zero_grad()
            on.print(on.backward(wrong.sum(), len(x)))
            of_d.step()
            both.d.requires_grad_(False)
            of_g.zero_grad()
            on.print(on.backward(F.softplus(-both("d", made)).sum(), len(x)))
            of_g.step()
            both.d.requires_grad_(True)


def dcgan(on: Plain) -> None:
    """PyTorch's tutorial: noise drawn for each batch, labels of ones and zeros."""
    both = Pair(mlp(4, 8, 6), mlp(6, 8, 1))
    criterion = nn.BCEWithLogitsLoss(reduction="sum")
    of_g = torch.optim.Adam(both.g.parameters(), 0.02, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(both.d.parameters(), 0.02, betas=(0.5, 0.999))
    both, of_g, of_d, loader = on.prepare(both, of_g, of_d, DataLoader(rows_of(6), 8, True))
    for _ in range(2):
        for x, _ in loader:
            of_d.zero_grad()
            true = both("d", x)[:, 0]
            noise = on.draw(lambda n: torch.randn(n, 4, dtype=torch.float64), len(x))
            made = both("g", noise)
            false = both("d", made.detach())[:, 0]
            loss = criterion(true, torch.ones_like(true)) + criterion(false, 0 * false)
            on.print(on.backward(loss, len(x)), on.sum(true.detach().sigmoid().sum()))
            of_d.step()
            of_g.zero_grad()
            false = both("d", made)[:, 0]
            on.print(on.backward(criterion(false, torch.ones_like(false)), len(x)))
            of_g.step()


def vae(on: Plain) -> None:
    """PyTorch's example: reconstruction and KL, and the mean loss of a pass."""
    model = VAE().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for _ in range(2):
        total = torch.tensor(0.0)
        for x, _ in loader:
            optimizer.zero_grad()
            noise = on.draw(lambda n: torch.randn(n, 3, dtype=torch.float64), len(x))
            again, mean, log_var = model(x, noise)
            kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
            loss = F.mse_loss(again, x, reduction="sum") + kl
            on.print(on.backward(loss, len(x)))
            total = total + loss.detach()
            optimizer.step()
        on.print(on.sum(total) / 37)


def autoencoder(on: Plain) -> None:
    """With a skip connection around the middle."""
    model = Autoencoder().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02, weight_decay=1e-5)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        for x, _ in loader:
            on.print(on.backward(F.mse_loss(model(x), x, reduction="none").mean(1).sum(), len(x)))
            step(optimizer)


def diffusion(on: Plain) -> None:
    """DDPM: a time and a noise drawn for each row."""
    model = mlp(7, 16, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    kept = torch.linspace(0.99, 0.9, 10).double().cumprod(0)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8, True))
    for _ in range(2):
        for x, _ in loader:
            t = on.draw(lambda n: torch.randint(0, 10, (n,)), len(x))
            noise = on.draw(lambda n, x=x: torch.randn(n, *x.shape[1:], dtype=x.dtype), len(x))
            share = kept[t][:, None]
            said = model(torch.cat([share.sqrt() * x + (1 - share).sqrt() * noise, share], 1))
            on.print(on.backward(F.mse_loss(said, noise, reduction="none").mean(1).sum(), len(x)))
            step(optimizer)


def masked_autoencoder(on: Plain) -> None:
    """A mask drawn for each row; the loss is over what is masked."""
    model = mlp(6, 12, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, _ in loader:
        mask = on.draw(lambda n: torch.rand(n, 6), len(x)) < 0.5
        loss = ((model(x.masked_fill(mask, 0)) - x).square() * mask).sum()
        on.print(on.backward(loss, mask.sum()))
        step(optimizer)


SCRIPTS: dict[str, Script] = {
    "gradient penalty": functools.partial(wgan_gp, lambda: nn.LayerNorm(10)),
    "gradient penalty and batch norm": functools.partial(
        wgan_gp, lambda: nn.BatchNorm1d(10), batch_norm="global"
    ),
    "GAN": gan,
    "DCGAN": dcgan,
    "VAE": vae,
    "autoencoder with skip": autoencoder,
    "diffusion": diffusion,
    "masked autoencoder": masked_autoencoder,
}
