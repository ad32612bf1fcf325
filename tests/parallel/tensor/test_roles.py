"""Patterns of names to roles: of a module of one's own, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from marks import by_hand
from phalanx.checkpoint.state import weights_of
from phalanx.comm.comm import Ranks
from phalanx.errors import CheckpointError, StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.parallel.tensor import apply
from phalanx.parallel.tensor.roles import bind_roles, default_patterns
from phalanx.strategy import Strategy
from phalanx.verify.harness import compare_cases, small_pieces, verify
from phalanx.verify.record import Case

SHAPE = ModelShape(
    vocab_size=67,
    num_layers=3,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn=48,
    max_seq_len=32,
    tied=True,
)


class Attention(nn.Module):
    """Queries, keys and values in one map; it keeps the number of heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, 4)
        self.after = nn.RMSNorm(width, eps=1e-5)
        self.mlp = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), bias)
        return x + self.mlp(self.after(x))


class Pool(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).tanh().mean(1)


class Vision(nn.Module):
    """Takes patches, not ids, and gives classes: no module of it is known to the library."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Linear(5, 16)
        self.layers = nn.ModuleList([Layer(16) for _ in range(num_layers)])
        self.mix = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 16))
        self.pool = Pool(16)
        self.classes = nn.Linear(16, 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x, bias)
        return self.classes(self.pool(x + self.mix(x)))


ROLES = {
    "patches": "scatter",
    "layers.*.before": "norm",
    "layers.*.attention": "branch",
    "layers.*.attention.qkv": "column/3",
    "layers.*.attention.out": "row",
    "layers.*.after": "norm",
    "layers.*.mlp": "branch",
    "layers.*.mlp.0": "column",
    "layers.*.mlp.2": "row",
    "mix": "token",
    "pool": "gather",
    "classes": "full",
}


class Classes:
    def loss_sum(self, model: nn.Module, microbatch: dict[str, Tensor], step: int) -> Tensor:
        logits = model(microbatch["x"], microbatch["bias"])
        return F.cross_entropy(logits, microbatch["label"], reduction="sum")

    def num_valid(self, microbatch: dict[str, Tensor]) -> int:
        return len(microbatch["x"])


def batches() -> list[dict[str, Tensor]]:
    """Rows and places that no degree divides; each row has a bias of attention of its own."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(7, 5, 5, generator=draw),
            "bias": torch.randn(7, 1, 5, 5, generator=draw),
            "label": torch.randint(0, 3, (7,), generator=draw),
        }
        for _ in range(2)
    ]


@pytest.mark.parametrize("text", [
    "tp2", by_hand("tp4:2d"), by_hand("dp2,tp2"), by_hand("tp8:2.5d/2"), by_hand("tp8:3d"),
])  # fmt: skip
def test_a_module_of_ones_own(text: str) -> None:
    strategy = Strategy.parse(text)
    # What the layouts of several axes do is the same in each layer.
    vision = functools.partial(Vision, 1 if ":" in text else 2)
    case = Case(vision, Classes(), batches(), 1, roles=ROLES)
    (verdict,) = compare_cases({"": case}, strategy)
    assert verdict.is_equal, str(verdict)
    num_rows = -(-7 // strategy.data_ranks)
    with small_pieces():
        predicted = Plan(strategy, vision().double(), roles=ROLES).traffic([(num_rows, 5)])
    assert {e for e in verdict.entries if e.phase not in ("count", "metrics")} == set(predicted)


def test_one_wrong_role_is_found() -> None:
    """Of fused maps split as one, ranks would mix queries and keys."""
    verdict = verify(
        Vision, batches(), "tp2", Classes(), roles={**ROLES, "layers.*.attention.qkv": "column"}
    )
    assert not verdict.is_equal


def fused_weight() -> tuple[Tensor, Tensor]:
    """Return this rank's part of a fused weight, and what it says is the whole."""
    model: Any = Vision()
    strategy = Strategy.parse("tp2")
    Plan(strategy, model, roles=ROLES).build(Ranks(strategy))
    with pytest.raises(CheckpointError, match=r"qkv.weight' contains several linear maps"):
        weights_of(model)
    weight = model.layers[0].attention.qkv.weight
    return weight.to_local().detach(), weight.full_tensor().detach()


def test_a_part_of_fused_maps_is_a_part_of_each() -> None:
    """Pins torch's private _StridedShard."""
    model: Any = Vision()
    whole = model.layers[0].attention.qkv.weight.detach()
    for rank, (part, gathered) in enumerate(run_ranks(fused_weight, 2)):
        assert torch.equal(gathered, whole)
        assert torch.equal(part, whole.view(3, 2, 8, 16)[:, rank].flatten(0, 1))


def as_replicas(shard: DTensor, requires_grad: bool) -> nn.Parameter:
    """Do what torch 2.14 does with placements that it does not know."""
    return nn.Parameter(shard.redistribute(placements=[Replicate()]), requires_grad)


def refusal() -> str:
    strategy = Strategy.parse("tp2")
    ours = SimpleNamespace(Parameter=as_replicas)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StrategyError) as refused:
        plan, comm = Plan(strategy, Vision(), roles=ROLES), Ranks(strategy)
        patch.setattr(apply, "nn", ours)
        plan.build(comm)
    return str(refused.value)


def test_shards_that_torch_replicates_are_refused() -> None:
    words = "tp: 'layers.0.attention.qkv' contains maps of sizes 1+1+1, which need PyTorch 2.12"
    assert all(found.startswith(words) for found in run_ranks(refusal, 2))


@pytest.mark.parametrize(
    "roles, words",
    [
        (
            {**ROLES, "layers.*.atention": "branch"},
            "matches no module; the nearest is 'layers...attention'",
        ),
        (
            {"patches": "colum"},
            "'colum' of 'patches' is not a role; the roles are embedding, ",
        ),
        ({"layers.*.mlp.2": "row/2"}, "only the role column takes several maps, as in 'column/3'"),
        ({"layers.*.mlp.0": "column/1"}, "only the role column takes several"),
        ({"layers.*.mlp.0": "column/2+0"}, "or in 'column/4.1.1' if the first map is four"),
        ({**ROLES, "layers.*.mlp.0": "row"}, "the branch 'layers.0.mlp' has no column map"),
        ({"layers.*.mlp.0": "column"}, "'layers.0.mlp.0' is in no module with the role branch"),
        ({"classes": "full"}, "'patches.weight' is in no module that has a role; give a pattern"),
        ({"mix": "token", "mix.0": "column"}, "'mix.0' is in no module"),
        (
            {"mix": "token", "mix.0": "full"},
            r"'mix.0' \(full\) is inside 'mix', whose role token",
        ),
        ({}, "the roles of the modules of Vision are not known; .* see docs/strategies.md"),
    ],
)
def test_what_is_refused(roles: dict[str, str], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Plan(Strategy.parse("tp2"), Vision(), roles=roles)


def test_a_shared_parameter_needs_one_role() -> None:
    model = Vision()
    model.bias = model.classes.bias
    assert Plan(Strategy.parse("tp2"), model, roles=ROLES).table()


def test_patterns_of_ones_own_come_first() -> None:
    decoder = Decoder(SHAPE)
    assert {binding.name: binding.role for binding in bind_roles(decoder)}["norm"] == "norm"
    assert {binding.name: binding.role for binding in bind_roles(decoder, {"norm": "token"})}[
        "norm"
    ] == "token"
    assert "position_embedding" not in default_patterns(decoder)


def test_dropout_of_torch_is_refused_and_ours_is_not() -> None:
    assert bind_roles(Decoder(dataclasses.replace(SHAPE, dropout=0.1)))
    model: Any = Vision()
    model.layers[1].mlp.append(nn.Dropout(0.25))
    with pytest.raises(StrategyError, match=r"'layers.1.mlp.3.p' = 0.25: ranks would not drop"):
        bind_roles(model, ROLES)
    model.layers[1].mlp[3].p = 0.0
    assert bind_roles(model, ROLES)


def test_tables_that_cannot_be_split_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 4, scale_grad_by_freq=True))
    with pytest.raises(StrategyError, match="'0' has scale_grad_by_freq = True"):
        bind_roles(model, {"0": "embedding"})


@pytest.mark.parametrize(
    "text, words",
    [
        ("fsdp2,tp2", r"'layers.0.attention.qkv.weight' contains 3 maps, and tp splits.*use dp2"),
        ("tp3", r"not a multiple of \d.*the nearest is tp2"),
        ("tp8", r"'layers.0.attention.num_heads' is 4, which is not a multiple of 8"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Plan(Strategy.parse(text), Vision(), roles=ROLES)


def test_the_report_says_what_happens_to_each_parameter() -> None:
    rows = {row.name: row for row in Plan(Strategy.parse("tp4:2d"), Decoder(SHAPE)).table()}
    assert sum(row.full == () for row in rows.values()) == 0
    up = rows["blocks.0-2.mlp.up.weight"]
    assert (up.role, up.full, up.shard) == ("column", (48, 32), (24, 16))
    assert up.notation == "[48_tp_col, 32_tp_row]"
    assert rows["embedding.weight"].shard == (34, 16)
    assert next(iter(rows)) == "embedding.weight" and list(rows)[-1] == "norm.weight"


def test_the_report_of_fused_and_tied_parameters() -> None:
    model = Vision()
    model.layers[1].mlp = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))
    model.bias = model.classes.bias
    rows = {row.name: row for row in Plan(Strategy.parse("tp8:3d"), model, roles=ROLES).table()}
    qkv = rows["layers.0-1.attention.qkv.weight"]
    assert (qkv.role, qkv.shard, qkv.notation) == ("column/3", (24, 4), "[48_tp_y, 16_tp_z_tp_x]")
    assert rows["layers.0-1.attention.qkv.bias"].notation == "[48]"
    assert rows["layers.0.mlp.0.weight"].full == (24, 16)
    assert rows["layers.1.mlp.0.weight"].full == (40, 16)
    assert rows["bias"].tied == ("classes.bias",)
