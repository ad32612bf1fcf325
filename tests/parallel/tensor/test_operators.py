"""What each layout file multiplies, looks up, gathers and normalises, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from parts import TEXTS, B, Cut, D, T, gap
from parts import F as WIDE
from torch import Tensor, nn

from phalanx.launch.local import run_ranks
from phalanx.models.layers import Norm
from phalanx.models.shape import ModelShape
from phalanx.parallel.reduce import partial_axes
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.parallel.tensor import operators
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.strategy import Strategy

NUM_IDS = 11  # odd: of three parts the last is short
SHAPE = ModelShape(
    vocab_size=NUM_IDS, num_layers=1, hidden=D, num_heads=2, num_kv_heads=1, head_dim=6, ffn=WIDE,
    max_seq_len=T, tied=True,
)  # fmt: skip


def beside_torch(text: str) -> dict[str, float]:
    """Return the largest error of each product, forward and backward, on this rank."""
    cut = Cut(text)
    every = columns, row, embedding, full, types, autocast, norms
    return {name: error for each in every for name, error in each(cut)}


def full_gradients(x: Tensor, weights: list[Tensor], d_ys: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    torch.autograd.backward([F.linear(leaves[0], w) for w in leaves[1:]], d_ys)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def columns(cut: Cut) -> Iterator[tuple[str, float]]:
    """Three maps that read one input, one of them as wide as an odd vocabulary."""
    widths = (WIDE, D, NUM_IDS)
    x = cut.random(B, T, D)
    weights = [cut.random(width, D, seed=n) for n, width in enumerate(widths, 1)]
    d_ys = [cut.random(B, T, width, seed=10 + n) for n, width in enumerate(widths)]
    d_x, *d_weights = full_gradients(x, weights, d_ys)
    x_part = cut.activation(x, cut.residual).requires_grad_()
    parts = [cut.matrix(weight, cut.column).requires_grad_() for weight in weights]
    ys = operators.column_parallel_linear(cut.layout, x_part, parts, T)
    torch.autograd.backward(ys, [cut.activation(d_y, cut.inner) for d_y in d_ys])
    for number, weight in enumerate(weights):
        yield f"column {number}", gap(ys[number], cut.activation(F.linear(x, weight), cut.inner))
        found = owed(cut, parts[number].grad)
        yield f"column {number}, weight", gap(found, cut.matrix(d_weights[number], cut.column))
    assert x_part.grad is not None
    yield "column, input", gap(x_part.grad, cut.activation(d_x, cut.residual))


def row(cut: Cut) -> Iterator[tuple[str, float]]:
    x, weight, d_y = cut.random(B, T, WIDE), cut.random(D, WIDE, seed=1), cut.random(B, T, D)
    d_x, d_weight = full_gradients(x, [weight], [d_y])
    x_part = cut.activation(x, cut.inner).requires_grad_()
    part = cut.matrix(weight, cut.row).requires_grad_()
    y = operators.row_parallel_linear(cut.layout, x_part, part)
    y.backward(cut.activation(d_y, cut.residual))
    assert x_part.grad is not None
    yield "row", gap(y, cut.activation(F.linear(x, weight), cut.residual))
    yield "row, input", gap(x_part.grad, cut.activation(d_x, cut.inner))
    yield "row, weight", gap(owed(cut, part.grad), cut.matrix(d_weight, cut.row))


def autocast(cut: Cut) -> Iterator[tuple[str, float]]:
    """A product under autocast is one of factors that are cast."""
    x = cut.activation(cut.random(B, T, D), cut.residual).float().requires_grad_()
    column = cut.matrix(cut.random(WIDE, D, seed=1), cut.column).float().requires_grad_()
    row = cut.matrix(cut.random(D, WIDE, seed=2), cut.row).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = operators.column_parallel_linear(cut.layout, x, [column], T)
        z = operators.row_parallel_linear(cut.layout, y.float(), row)
    (right,) = operators.column_parallel_linear(cut.layout, x.bfloat16(), [column], T)
    yield "autocast, column", gap(y, right)
    yield "autocast, row", gap(z, operators.row_parallel_linear(cut.layout, right, row))
    assert y.dtype == z.dtype == torch.bfloat16
    z.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == column.grad.dtype == torch.float32


def owed(cut: Cut, grad: Tensor | None) -> Tensor:
    """Add up the gradient of a weight that all layers of depth hold."""
    assert grad is not None
    return cut.comm.all_reduce(grad, "tp_depth") if "tp_depth" in cut.layout.axes else grad


def embedding(cut: Cut) -> Iterator[tuple[str, float]]:
    """Each part of the vocabulary has a term of the sum."""
    number, count = cut.position(cut.column[0])
    terms, d_x = cut.random(count, B, T, D), cut.random(B, T, D, seed=1)
    # As many rows as the residual has, of which a part may have been taken already.
    missing = -B % cut.position(cut.residual[0])[1]

    def looked_up(tensor: Tensor) -> Tensor:
        rows = torch.cat((tensor, tensor.new_zeros(missing, T, D)))
        part = cut.padded(cut.padded(rows, 0, cut.entry), 2, cut.column[1])
        return part.clone(memory_format=torch.contiguous_format)

    partial = looked_up(terms[number]).requires_grad_()
    x = operators.reduce_embedding(cut.layout, partial)
    x.backward(cut.activation(d_x, cut.residual))
    assert partial.grad is not None
    yield "embedding", gap(x, cut.activation(terms.sum(0), cut.residual))
    yield "embedding, gradient", gap(partial.grad, looked_up(d_x))


def full(cut: Cut) -> Iterator[tuple[str, float]]:
    for width, name, axes in ((D, "residual", cut.residual), (NUM_IDS, "inner", cut.inner)):
        x, d_x = cut.random(B, T, width), cut.random(B, T, width, seed=1)
        part = cut.activation(x, axes).requires_grad_()
        spec = getattr(cut.layout, name)
        gathered = operators.unshard(cut.layout, part, spec, cut.batch, width)
        gathered.backward(d_x)
        assert part.grad is not None
        yield f"full {name}", gap(gathered, x)
        yield f"full {name}, gradient", gap(part.grad, cut.activation(d_x, axes))


def types(cut: Cut) -> Iterator[tuple[str, float]]:
    """Products in bfloat16 of float32 masters: their gradients are float32, the inputs' are not."""
    x = cut.random(B, T, D).bfloat16()
    weights = [cut.random(D, D, seed=n).float() for n in (1, 2)]
    part = cut.activation(x, cut.residual).requires_grad_()
    column, row = (
        cut.matrix(weight, axes).requires_grad_()
        for weight, axes in zip(weights, (cut.column, cut.row), strict=True)
    )
    (y,) = operators.column_parallel_linear(cut.layout, part, [column], T)
    z = operators.row_parallel_linear(cut.layout, y, row)
    z.backward(torch.ones_like(z))
    expected = F.linear(F.linear(x, weights[0].bfloat16()), weights[1].bfloat16())
    assert part.grad is not None and column.grad is not None and row.grad is not None
    assert [t.dtype for t in (y, z, part.grad)] == [torch.bfloat16] * 3
    assert [t.dtype for t in (column.grad, row.grad)] == [torch.float32] * 2
    error = gap(z, cut.activation(expected, cut.residual)) / float(expected.abs().max())
    yield "bfloat16, rounded", error


class Normed(nn.Module):
    def __init__(self, shape: ModelShape, seed: int) -> None:
        super().__init__()
        self.norm = Norm(D, shape).double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter, generator=generator)


def norms(cut: Cut) -> Iterator[tuple[str, float]]:
    tensor = Strategy(tp=cut.strategy.tp)
    for kind in ("rms", "layer"):
        shape = SHAPE if kind == "rms" else ModelShape(**{**vars(SHAPE), "norm": "layer"})
        x, d_y = cut.random(B, T, D) + 3, cut.random(B, T, D, seed=1)
        alone, split = Normed(shape, cut.copy).norm, Normed(shape, cut.copy)
        expected = x.clone().requires_grad_()
        y = alone(expected)
        y.backward(d_y)
        target = Target(tensor, skeleton_of(split), roles={"norm": "norm"})
        TensorSplit(target).apply(split, cut.comm)
        part = cut.activation(x, cut.residual).requires_grad_()
        y_part = split.norm(part)
        y_part.backward(cut.activation(d_y, cut.residual))
        assert expected.grad is not None and part.grad is not None
        # Padded places are normalised too: in LayerNorm they become the bias. They count nowhere.
        is_there = cut.activation(torch.ones_like(x), cut.residual)
        yield kind, gap(y_part * is_there, cut.activation(y.detach(), cut.residual))
        yield f"{kind}, input", gap(part.grad, cut.activation(expected.grad, cut.residual))
        for name, parameter in split.norm.named_parameters():
            grad = parameter.grad.to_local()
            for axis in partial_axes(parameter):
                cut.comm.all_reduce(grad, axis)
            found = cut.short(alone.get_parameter(name).grad, 0, cut.residual[2])
            yield f"{kind}, {name}", gap(grad, found)


@pytest.mark.parametrize("text", TEXTS)
def test_products_are_those_of_torch(text: str) -> None:
    for errors in run_ranks(beside_torch, Strategy.parse(text).num_ranks, text, threads=1):
        assert errors.pop("bfloat16, rounded") < 0.02
        assert len(errors) == 7 + 3 + 2 + 4 + 9
        assert max(errors.values()) < 1e-12, errors
