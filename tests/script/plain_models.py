"""Models and data of the plain scripts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    Dataset,
    IterableDataset,
    TensorDataset,
)


def rows_of(*sizes: int, num_rows: int = 37, classes: int = 5) -> TensorDataset:
    """Return numbers of a size, and a class for each row."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_rows, *sizes, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (num_rows,), generator=generator))


def mlp(*sizes: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*list(itertools.chain(*layers))[:-1]).double()


class Pair(nn.Module):
    """Two models that take turns."""

    def __init__(self, g: nn.Module, d: nn.Module) -> None:
        super().__init__()
        self.g, self.d = g, d

    def forward(self, which: str, x: Tensor) -> Tensor:
        return self.g(x) if which == "g" else self.d(x)


class Residual(nn.Module):
    """Blocks between a first and a last map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(mlp(8, 12, 8) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Branched(nn.Module):
    """Has a head for the rows of one class alone, so that some ranks do not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 10), nn.BatchNorm1d(10)
        self.second, self.norm_2 = nn.Linear(10, 10), nn.BatchNorm1d(10)
        self.last, self.head = nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm_2(self.second(self.norm(self.first(x)).tanh())).tanh()
        logits = self.last(x)
        if (y == 0).any():
            logits = logits + torch.where((y == 0)[:, None], self.head(x), 0)
        return logits


class Tables(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(40, 6, sparse=sparse, mode="sum").double()
        self.rest = mlp(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.table((x * 4).long() + 20))


class Scaled(nn.Module):
    """A number without dimensions scales the logits, as that of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.logit_scale = mlp(6, 8, 5), nn.Parameter(torch.tensor(0.7).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x) * self.logit_scale.exp()


class LoRA(nn.Module):
    """A frozen map and what is learned beside it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 2, bias=False)
        self.up = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.norm, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 3, 4, 2, 1)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.middle(self.down(x).relu())).relu()
        return self.last(torch.cat([self.up(y), x], 1))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.last(x[:, 0])


class Boxes(Dataset[Any]):
    """Images, each with its own number of boxes."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=draws, dtype=torch.float64)
        return x, torch.randn(index % 4, 2, generator=draws, dtype=torch.float64)


def as_lists(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    return torch.stack([x for x, _ in samples]), [boxes for _, boxes in samples]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([rows_of(6)[index] for index in range(37)])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(mlp(6, 6) for _ in range(3)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(6, 10)
        self.heads = nn.ModuleList(nn.Linear(10, 5) for _ in range(2))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.trunk(x).tanh())


class Heads(nn.Module):
    """Two heads on one trunk, both of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.of_class, self.of_number = mlp(6, 10), nn.Linear(10, 5), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.of_class(x), self.of_number(x)[:, 0]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 8, 6), mlp(3, 8, 6)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (0.5 * log_var).exp()), mean, log_var


class Autoencoder(nn.Module):
    """Its skip connection passes by the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Linear(6, 8), nn.Linear(8, 2)
        self.wide, self.last = nn.Linear(2, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.last(self.wide(self.narrow(h).tanh()) + h)


class Graph(nn.Module):
    """Two layers of graph convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        h = torch.sparse.mm(links, self.first(x)).relu()
        return torch.sparse.mm(links, self.last(h))


class Named(nn.Module):
    class Output(NamedTuple):
        logits: Tensor
        features: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = mlp(6, 10, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Output:
        features = self.trunk(x)
        return Named.Output(self.head(features.relu()), features)


class Shared(nn.Module):
    """One block that runs three times, a second name of it, and a module within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(6, 8), mlp(8, 8, 8)
        self.layers = nn.ModuleList([self.block, nn.Sequential(self.block, nn.Tanh())])
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)
