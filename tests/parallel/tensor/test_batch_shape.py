"""The shape of the batch that is known is that of the forward under way, or that runs again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parts import Cut, gap
from torch import Tensor, nn

from marks import by_hand
from phalanx.launch.local import run_ranks
from phalanx.models.attention import documents_of, rotation
from phalanx.models.decoder import Block
from phalanx.models.random import layer_keys, row_keys
from phalanx.models.shape import ModelShape
from phalanx.parallel.batch_shape import BatchShape, batch_scope, batch_shape, carried, note
from phalanx.parallel.recompute import RecomputeSplit
from phalanx.parallel.reduce import partial_axes
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.parallel.tensor.roles import DECODER
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.strategy import Strategy

SHAPE = ModelShape(
    vocab_size=11, num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=16, dropout=0.2, qk_norm=True,
)  # fmt: skip
ROLES = {
    name: role
    for name, role in DECODER.items()
    if name.startswith("blocks.") and not name.endswith("output_norm")
}
OF_EIGHT = ("tp8:2.5d/2", "tp8:3d")
SIZES = ((5, 7), (3, 9))
"""Rows and positions of two microbatches, which no layout divides, under way at one time."""


def run_at_once(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


class Stage(nn.Module):
    """Blocks alone, as a stage of a pipeline between the first and the last has them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(SHAPE, index) for index in range(2))
        self.segment_size = 2
        self.run_segment = run_at_once
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        self.double()

    def forward(self, x_BTD: Tensor, *others: Tensor) -> Tensor:
        if self.segment_size == 2:
            return self.run_segment(self.run, x_BTD, *others)
        return self.run(x_BTD, *others)

    def run(self, x_BTD: Tensor, documents_BT: Tensor, keys_B: Tensor) -> Tensor:
        length = documents_BT.shape[1]
        angles = rotation(SHAPE, torch.arange(length)[None], x_BTD.dtype)
        documents = documents_of(documents_BT, x_BTD.device)
        blocks: Any = self.blocks
        for block in blocks:
            keys = layer_keys(keys_B, block.index)
            x_BTD = block(x_BTD, angles, documents, keys)
        return x_BTD


def others_of(num_rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the documents and the keys of dropout of a microbatch."""
    documents = (torch.arange(length) > 2).long() + torch.arange(num_rows)[:, None]
    return documents, row_keys(0, 1, torch.arange(num_rows))


def errors_of_stage(text: str, policies: list[str]) -> dict[str, float]:
    """Return the largest error of results and gradients, forwards before the first backward."""
    cut = Cut(text)
    strategy = Strategy(tp=cut.strategy.tp)
    whole: Any = Stage()
    errors: dict[str, float] = {}
    for policy in policies:
        split: Any = copy.deepcopy(whole)
        again = Strategy.parse(f"{strategy},recompute:{policy}")
        target = Target(again, skeleton_of(split), roles=ROLES)
        for axis in (TensorSplit(target), RecomputeSplit(target)):
            axis.apply(split, cut.comm)
        whole.zero_grad()
        pending: list[Any] = []
        for number, (num_rows, length) in enumerate(SIZES):
            x = cut.random(num_rows, length, SHAPE.hidden, seed=number)
            d_y = cut.random(num_rows, length, SHAPE.hidden, seed=10 + number)
            expected = x.clone().requires_grad_()
            y = whole(expected, *others_of(num_rows, length))
            y.backward(d_y)
            shard = cut.activation(x, cut.residual).requires_grad_()
            with batch_scope(BatchShape(num_rows, length)):
                y_shard = split(shard, *others_of(num_rows, length))
            pending.append((y, y_shard, expected, shard, d_y))
        for number, (y, y_shard, expected, shard, d_y) in enumerate(pending):
            is_there = cut.activation(torch.ones_like(y), cut.residual)
            before = [parameter.grad for parameter in split.parameters()]
            split.zero_grad()  # to be added as parts: DTensor takes long to derive how it adds
            y_shard.backward(cut.activation(d_y, cut.residual))
            for parameter, grad in zip(split.parameters(), before, strict=True):
                if grad is not None:
                    parameter.grad.to_local().add_(grad.to_local())
            found = {
                "result": gap(
                    y_shard.detach() * is_there, cut.activation(y.detach(), cut.residual)
                ),
                "input": gap(shard.grad, cut.activation(expected.grad, cut.residual)),
            }
            errors |= {f"{policy}, microbatch {number}, {key}": v for key, v in found.items()}
        for name, parameter in split.named_parameters():
            grad = parameter.grad.to_local()
            for axis in partial_axes(parameter):
                cut.layout.comm.all_reduce(grad, axis)
            errors[f"{policy}, {name}"] = gap(
                parameter.grad.full_tensor(), whole.get_parameter(name).grad
            )
    return errors


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("tp2", ["none", "full", "every/2", "selective"]),
        ("tp4:2d", ["selective"]),
        by_hand("tp4:2d", ["none", "full", "every/2"]),
        *(by_hand(text, ["none", "selective"]) for text in ("tp2:megatron", *OF_EIGHT)),
    ],
)
def test_a_stage_without_an_embedding_is_as_the_whole(text: str, policies: list[str]) -> None:
    """While several microbatches are under way; with every way to recompute in 1D and 2D."""
    ranks = run_ranks(errors_of_stage, Strategy.parse(text).num_ranks, text, policies, threads=1)
    for errors in ranks:
        assert len(errors) == len(policies) * (2 * 2 + 22)
        assert max(errors.values()) < 1e-12, errors


def test_a_scope_ends_with_its_forward() -> None:
    with pytest.raises(RuntimeError, match="runs outside of the forward of its model"):
        batch_shape()
    with batch_scope():
        note(BatchShape(2, 3))
        with batch_scope(BatchShape(4, 5)):
            assert batch_shape() == BatchShape(4, 5)
            with batch_scope():  # a model inside a stage knows what the stage knows
                assert batch_shape() == BatchShape(4, 5)
                note(BatchShape(6, 7))
            assert batch_shape() == BatchShape(4, 5)
            again = carried(batch_shape)
        assert batch_shape() == BatchShape(2, 3)
    assert again() == BatchShape(4, 5)
    with pytest.raises(RuntimeError, match="inside `batch_scope`"):
        batch_shape()
