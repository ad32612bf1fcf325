"""The bytes of each layout by the formulas that its file states, as plain arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.ledger import Entry
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.parallel.tensor import account
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.placed import sharded_parameters
from phalanx.parallel.tensor.roles import bind_roles
from phalanx.strategy import Strategy

B, T, D, F = 5, 10, 16, 48
FP32, BF16 = 4, 2


class Branch(nn.Module):
    def __init__(self, num_in: int, num_inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(num_in, num_inner, bias=False)
        self.down = nn.Linear(num_inner, num_in, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Pair(nn.Module):
    """One column and one row product, and nothing else that moves."""

    def __init__(self, num_in: int = D, num_inner: int = F) -> None:
        super().__init__()
        self.branch = Branch(num_in, num_inner)


PATTERNS = {"branch": "branch", "branch.up": "column", "branch.down": "row"}


def traffic(target: Target, batch: BatchShape) -> list[Entry]:
    """Return what is sent over tp, of sizes too that a plan refuses."""
    layout = layout_of(target.strategy)
    bindings = bind_roles(target.skeleton.model, target.roles)
    rows = sharded_parameters(target.skeleton, bindings, layout)
    return account.traffic(target, layout, bindings, rows, [batch])


def sent_by_pair(text: str, compute: torch.dtype | None = None) -> dict[str, float]:
    """Return the bytes that a rank sends in each phase of one microbatch of B rows of T places."""
    target = Target(Strategy.parse(text), skeleton_of(Pair()), compute, PATTERNS)
    entries = traffic(target, BatchShape(B, T))
    phases = {entry.phase for entry in entries}
    return {phase: sum(e.sent_bytes for e in entries if e.phase == phase) for phase in phases}


@pytest.mark.parametrize("num_ranks, length", [(2, 10), (4, 12), (8, 16)])
def test_one_dimension(num_ranks: int, length: int) -> None:
    """Five times (N-1)/N of B T D, T padded to a multiple of N; F does not matter."""
    once = (num_ranks - 1) / num_ranks * B * length * D * FP32
    assert sent_by_pair(f"tp{num_ranks}") == {"forward": 2 * once, "backward": 3 * once}
    half = {phase: sent / 2 for phase, sent in sent_by_pair(f"tp{num_ranks}").items()}
    assert sent_by_pair(f"tp{num_ranks}", torch.bfloat16) == half


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_dimension_with_whole_activations(num_ranks: int) -> None:
    """Megatron's f and g: one all-reduce of B T D each way, twice (N-1)/N of it; nothing padded."""
    once = (num_ranks - 1) / num_ranks * B * T * D * FP32
    sent = {"forward": 2 * once, "backward": 2 * once}
    assert sent_by_pair(f"tp{num_ranks}:megatron") == sent


@pytest.mark.parametrize("q, rows", [(2, 6), (4, 8)])
def test_two_dimensions(q: int, rows: int) -> None:
    """q panels of B T D / q^2 five times, q of each weight's D F / q^2 three times."""
    share = (q - 1) / q
    x = share * q * rows * T * D / q**2
    weight = share * q * D * F / q**2
    assert sent_by_pair(f"tp{q * q}:2d") == {
        "forward": FP32 * (2 * x + 2 * weight),
        "backward": FP32 * (3 * x + 2 * 2 * weight),
    }
    # In bfloat16 all but the sums of the weights' gradients, which are of the masters' type.
    assert sent_by_pair(f"tp{q * q}:2d", torch.bfloat16) == {
        "forward": BF16 * (2 * x + 2 * weight),
        "backward": BF16 * (3 * x + 2 * weight) + FP32 * 2 * weight,
    }


@pytest.mark.parametrize("q, depth, rows", [(2, 2, 8), (2, 3, 6), (4, 2, 8)])
def test_two_and_a_half_dimensions(q: int, depth: int, rows: int) -> None:
    """Two dimensions with B / depth rows, and the gradient of each weight summed over depth."""
    share = (q - 1) / q
    x = share * q * (rows / depth) * T * D / q**2
    weight = share * q * D * F / q**2
    assert sent_by_pair(f"tp{q * q * depth}:2.5d/{depth}") == pytest.approx(
        {
            "forward": FP32 * (2 * x + 2 * weight),
            "backward": FP32 * (3 * x + 4 * weight),
            "reduce": FP32 * 2 * (depth - 1) / depth * 2 * D * F / q**2,
        }
    )


@pytest.mark.parametrize("q, rows", [(2, 8), (4, 16)])
def test_three_dimensions(q: int, rows: int) -> None:
    """(q-1)/q of 3 I K / q^2 + 2 I J / q^2 + 3 K J / q^2 for each product of I rows, K to J."""
    share, i = (q - 1) / q, rows * T

    def product(k: int, j: int) -> tuple[float, float]:
        x, y, weight = i * k / q**2, i * j / q**2, k * j / q**2
        forward, backward = x + weight + y, 2 * x + y + 2 * weight
        assert forward + backward == 3 * x + 2 * y + 3 * weight
        return share * forward, share * backward

    column, row = product(D, F), product(F, D)
    assert sent_by_pair(f"tp{q**3}:3d") == {
        "forward": FP32 * (column[0] + row[0]),
        "backward": FP32 * (column[1] + row[1]),
    }
    gradients = 2 * share * D * F / q**2
    assert sent_by_pair(f"tp{q**3}:3d", torch.bfloat16) == {
        "forward": BF16 * (column[0] + row[0]),
        "backward": BF16 * (column[1] + row[1] - gradients) + FP32 * gradients,
    }


def test_two_dimensions_send_an_q_plus_first_of_the_activations_of_one() -> None:
    for q in (2, 4):
        weights = 6 * (q - 1) / q * D * F / q * FP32
        batch = BatchShape(4 * q, 4 * q * q)
        sent = [
            sum(
                e.sent_bytes for e in traffic(Target(s, skeleton_of(Pair()), roles=PATTERNS), batch)
            )
            for s in (Strategy.parse(f"tp{q * q}"), Strategy.parse(f"tp{q * q}:2d"))
        ]
        assert sent[1] - weights == pytest.approx(sent[0] / (q + 1))


def test_when_more_dimensions_send_less() -> None:
    """Three dimensions send less than two from (1 + F/D)^6 ranks on: 64 where F is D."""
    texts = ("tp64", "tp64:2d", "tp64:3d", "tp64:2.5d/4")
    sent: dict[int, list[float]] = {}
    for ratio in (1, 4):
        with torch.device("meta"):
            pair = Pair(1024, ratio * 1024)
        sent[ratio] = [
            sum(e.sent_bytes for e in traffic(target, BatchShape(256, 1024)))
            for target in (
                Target(Strategy.parse(t), skeleton_of(pair), roles=PATTERNS) for t in texts
            )
        ]
    to_others = (3 / 4) / (7 / 8)  # of 4 ranks on each axis, and of 8
    one, two, three, deep = sent[1]
    assert one > 4 * two > 4 * deep
    assert three == pytest.approx(to_others * two, rel=0.05)
    _, two, three, _ = sent[4]
    assert three == pytest.approx(to_others * 5 / 2 * two, rel=0.05)


SHAPE = ModelShape(
    vocab_size=66, num_layers=1, hidden=D, num_heads=4, num_kv_heads=4, head_dim=4, ffn=F,
    max_seq_len=T, tied=True,
)  # fmt: skip


def sent_by(model: nn.Module, text: str, op: str) -> dict[tuple[str, str], float]:
    """Return the bytes that a rank sends by one kind of collective, by phase and axis."""
    entries = Plan(Strategy.parse(text), model).traffic([(8, T)])
    return {(e.phase, e.axis): e.sent_bytes for e in entries if e.op == op}


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_embedding_norms_and_loss_of_two_dimensions(kind: str) -> None:
    """Rows of ids reduced and swapped; one number a row each way and norm, three for the loss."""
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(SHAPE, norm=kind))
    q, rows, num_norms = 2, 8 // 2, 3
    scattered = 1 / 2 * 8 * T * D / q * FP32
    swapped = 3 / 4 * 8 * T * D / q**2 * FP32
    assert sent_by(model, "tp4:2d", "reduce_scatter") == {("forward", "tp_col"): scattered}
    assert sent_by(model, "tp4:2d", "all_gather") == {("backward", "tp_col"): scattered}
    assert sent_by(model, "tp4:2d", "all_to_all") == {
        ("forward", "tp"): swapped,
        ("backward", "tp"): swapped,
    }
    numbers = 1 if kind == "rms" else 2
    of_norms = 2 * 1 / 2 * num_norms * numbers * rows * T * FP32
    of_loss = 2 * 1 / 2 * 3 * rows * T * FP32
    assert sent_by(model, "tp4:2d", "all_reduce") == {
        ("forward", "tp_col"): of_norms + of_loss,
        ("backward", "tp_col"): of_norms,
        ("forward", "tp_row"): 2 * 1 / 2 * FP32,  # the sum of the losses of all rows
        # Vectors are split over the columns alone, so each gradient owes a sum over the rows.
        ("reduce", "tp_row"): 2 * 1 / 2 * num_norms * numbers * D / q * FP32,
    }


def test_embedding_of_the_others() -> None:
    with torch.device("meta"):
        model = Decoder(SHAPE)
    one = sent_by(model, "tp2", "reduce_scatter")["forward", "tp"]
    # Two branches and the embedding each scatter once.
    assert one == 3 * 1 / 2 * 8 * T * D * FP32
    deep = sent_by(model, "tp8:2.5d/2", "reduce_scatter")["forward", "tp_col"]
    assert deep == 1 / 2 * (8 / 2) * T * D / 2 * FP32
    cube = sent_by(model, "tp8:3d", "all_to_all")
    dealt = 1 / 2 * 8 * T * D / 4 * FP32
    assert cube == {("forward", "tp_x"): dealt, ("backward", "tp_x"): dealt}
