"""Layouts that wait, or that overlap more, for comparison with those of phalanx.parallel.tensor."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from block import BlockSize, Precision
from layouts import parse_layout
from phalanx.parallel.tensor import two_d
from phalanx.parallel.tensor.apply import LAYOUTS
from phalanx.parallel.tensor.layout import weight_gradient
from phalanx.parallel.tensor.one_d import OneD
from phalanx.parallel.tensor.two_d import TwoD
from split_block import SplitBlock, time_in_turns


class FetchesLate(TwoD):
    """Fetches each panel when it is needed."""

    def panels(self, axis: str, *shards: Tensor) -> Iterator[list[Tensor]]:
        for turn in range(self.comm.size(axis)):
            yield [one.wait() for one in self._fetch(axis, turn, shards)]


class WaitsForSums(two_d._Reductions):
    """Waits for each sum before the next product."""

    def add(self, term: Tensor) -> None:
        super().add(term)
        self._finish()
        self._pending = None


class Arriving(OneD):
    """Multiplies each part while the others travel, and sends each as it is made."""

    def column_parallel_linear(
        self, x: Tensor, weights: Sequence[Tensor], length: int
    ) -> list[Tensor]:
        size, num_ranks = x.shape[1], self.comm.size("tp")
        casts = [weight.to(x.dtype) for weight in weights]
        ys = [x.new_empty(x.shape[0], num_ranks * size, len(w)) for w in casts]
        for source, part in self.arriving(x):
            for y, weight in zip(ys, casts, strict=True):
                y[:, source * size : (source + 1) * size] = F.linear(part, weight)
        return [y[:, :length] for y in ys]

    def column_parallel_linear_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        parts = self.arriving(x)
        first = next(parts)  # so that they travel meanwhile
        casts = [weight.to(x.dtype) for weight in weights]
        size = x.shape[1]

        def d_x_of(target: int) -> Tensor:
            places = slice(target * size, (target + 1) * size)
            return sum(d_y[:, places] @ w for d_y, w in zip(d_ys, casts, strict=True))

        d_x = self.leaving(d_x_of)
        by_source = dict([first, *parts])
        whole = torch.cat([by_source[s] for s in sorted(by_source)], 1)
        return d_x, [weight_gradient(d, whole, w.dtype) for d, w in zip(d_ys, weights, strict=True)]

    def row_parallel_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        weight, size = weight.to(x.dtype), x.shape[1] // self.comm.size("tp")
        return self.leaving(lambda t: F.linear(x[:, t * size : (t + 1) * size], weight))

    def row_parallel_linear_backward(
        self, x: Tensor, weight: Tensor, d_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        d_x, size, cast = torch.empty_like(x), d_y.shape[1], weight.to(x.dtype)
        d_weight = torch.zeros_like(weight)
        for source, part in self.arriving(d_y):
            places = slice(source * size, (source + 1) * size)
            d_x[:, places] = part @ cast
            d_weight += weight_gradient(part, x[:, places], weight.dtype)
        return d_x, d_weight

    def arriving(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its part), this rank's own first, while the others travel."""
        group, part = self.comm.mesh.get_group("tp"), part.detach().contiguous()
        num_ranks, coord = group.size(), group.rank()
        received, sent = [], []
        for distance in range(1, num_ranks):
            source, target = (coord - distance) % num_ranks, (coord + distance) % num_ranks
            buffer = torch.empty_like(part)
            received.append((source, buffer, dist.irecv(buffer, group=group, group_src=source)))
            sent.append(dist.isend(part, group=group, group_dst=target))
        yield coord, part
        for source, buffer, work in received:
            work.wait()
            yield source, buffer
        for work in sent:
            work.wait()

    def leaving(self, part_of) -> Tensor:
        """Sum part_of(rank) over ranks for each rank; what is for others leaves as it is made."""
        group = self.comm.mesh.get_group("tp")
        num_ranks, coord = group.size(), group.rank()
        received, sent = [], []
        for distance in range(1, num_ranks):
            target = (coord + distance) % num_ranks
            part = part_of(target).contiguous()
            sent.append((part, dist.isend(part, group=group, group_dst=target)))
            source, buffer = (coord - distance) % num_ranks, torch.empty_like(part)
            received.append((source, buffer, dist.irecv(buffer, group=group, group_src=source)))
        by_source = {coord: part_of(coord)}
        for source, buffer, work in received:
            work.wait()
            by_source[source] = buffer
        for _, work in sent:
            work.wait()
        total = by_source[0].clone()
        for source in range(1, num_ranks):
            total += by_source[source]
        return total


VARIANTS = {
    "2d": {
        "as it is": (TwoD, False),
        "panels fetched when needed": (FetchesLate, False),
        "and each sum waited for": (FetchesLate, True),
    },
    "1d": {"as it is": (OneD, False), "parts multiplied as they arrive": (Arriving, False)},
}
"""Of each kind, by name: the layout, and whether it waits for sums."""


class Variant(SplitBlock):
    """A block split by another layout than its strategy's own."""

    def __init__(self, name: str, text: str, size: BlockSize, precision: Precision) -> None:
        strategy = parse_layout(text)
        kind, self._waits = VARIANTS[strategy.tp.kind][name]
        with patch.dict(LAYOUTS, {strategy.tp.kind: kind}):
            super().__init__(strategy, size, precision)
        assert type(self.layout) is kind

    def step(self, *args: object) -> None:
        waits: AbstractContextManager[object] = nullcontext()
        if self._waits:
            waits = patch.object(two_d, "_Reductions", WaitsForSums)
        with waits:
            super().step(*args)


def overlap_rank(
    text: str, size_texts: Sequence[str], precision: Precision, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each step, by size and variant; all variants compute the same."""
    times_s = {}
    names = list(VARIANTS[parse_layout(text).tp.kind])
    for size_text in size_texts:
        blocks = [Variant(name, text, BlockSize.parse(size_text), precision) for name in names]
        for block in blocks:
            block.step()
            for mine, first in zip(results(block), results(blocks[0]), strict=True):
                assert (mine - first).norm() <= 1e-5 * first.norm()
        times_s[size_text] = dict(zip(names, time_in_turns(blocks, repeats), strict=True))
    return times_s


def results(block: SplitBlock) -> list[Tensor]:
    """Return the gradients of the last step."""
    grads = [parameter.grad.to_local() for parameter in block.model.parameters()]
    return [block.x.grad, *grads]
