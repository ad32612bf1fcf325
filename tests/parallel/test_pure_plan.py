"""Asking a plan changes no model, and asks of a shape each kind of block once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import StrategyError
from phalanx.models.decoder import Block, Decoder
from phalanx.models.registry import shape_of
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import Plan, plan_decoder
from phalanx.parallel.tensor import account
from phalanx.strategy import KINDS, Strategy

SHAPE = ModelShape(
    vocab_size=64, num_layers=6, hidden=32, num_heads=8, num_kv_heads=8, head_dim=4, ffn=48,
    max_seq_len=32, tied=True, dropout=0.1,
)  # fmt: skip
MICROBATCHES = [(8, 16)] * 4
ROLES = {"blocks.*": "branch", "blocks.*.up": "column", "blocks.*.down": "row", "outer.*": "local"}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class AnyModule(nn.Module):
    """A chain of blocks whose first and last module share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = ["outer.0", *(f"blocks.{n}" for n in range(6)), "outer.1"]
        ends = [nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)]
        ends[1].weight = ends[0].weight
        self.blocks = nn.ModuleList(Branch() for _ in range(6))
        self.add_module("outer", nn.Sequential(*ends))
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.blocks[0].register_forward_hook(lambda *_: None)

    @property
    def text(self) -> str:
        return "any"

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule("outer.0")(x)
        for block in self.blocks:
            x = block(x)
        return self.get_submodule("outer.1")(x)


EXPERTS = dataclasses.replace(SHAPE, experts=ExpertShape(num_experts=4, top_k=2, ffn=16))


def decoder() -> Decoder:
    return Decoder(SHAPE)


def sparse() -> Decoder:
    return Decoder(EXPERTS)


def contents(value: Any) -> Any:
    """Return what identifies a value: of a container, each element of it."""
    if isinstance(value, dict):
        return {key: contents(each) for key, each in value.items()}
    if isinstance(value, list | set | tuple):
        return [contents(each) for each in value]
    own = (value._version, value.dtype, value.shape) if isinstance(value, Tensor) else ()
    return id(value), type(value), *own


def everything(model: nn.Module) -> list[Any]:
    """Return each module with its attributes, hooks and parameters, and what its class has."""
    return [
        (name, id(module), type(module), contents(vars(module)), contents(dict(vars(type(module)))))
        for name, module in model.named_modules(remove_duplicate=False)
    ]


def ask(plan: Plan[Any]) -> None:
    """Ask a plan all that it answers."""
    for pp_rank in range(plan.strategy.pp.degree):
        of = plan.for_pp_rank(pp_rank)
        of.holds(4)
        of.traffic(MICROBATCHES)
        of.header_traffic(MICROBATCHES, [])
        of.table()
    assert plan.row_shards * plan.position_shards > 0
    assert (plan.schedule(4) is None) == (plan.cut is None) == (plan.strategy.pp.degree == 1)
    assert (plan.layout is None) == (plan.strategy.tp.degree == 1)
    assert (plan.order is None) == (plan.strategy.cp.degree == 1)
    assert isinstance(plan.uncompilable_axes, str)


def texts() -> list[str]:
    """Return a strategy of each kind that is built, alone, and some of several axes."""
    found: list[str] = []
    for axis, kinds in KINDS.items():
        for kind, rule in kinds.items():
            if rule.about:
                option = "/2" if rule.option else ""
                degree = {"recompute": "", "tp": "8" if kind in ("2.5d", "3d") else "4"}
                found.append(f"{axis}{degree.get(axis, '2')}:{kind}{option}")
    return [*found, "pp2,dp2,fsdp2", "pp2,cp2,tp2", "fsdp2,tp2,recompute:full"]


@pytest.mark.parametrize("build", [decoder, AnyModule])
@pytest.mark.parametrize("text", texts())
def test_asking_a_plan_leaves_the_model_as_it_is(text: str, build: Callable[[], nn.Module]) -> None:
    strategy = Strategy.parse(text)
    model = sparse() if build is decoder and strategy.ep.degree > 1 else build()
    roles = ROLES if build is AnyModule and strategy.tp.degree > 1 else None
    before = everything(model)
    only_decoder = strategy.cp.degree * strategy.ep.degree > 1 or "every" in text or "sqrt" in text
    if build is AnyModule and only_decoder:
        with pytest.raises(StrategyError):
            Plan(strategy, model, roles=roles)
    else:
        ask(Plan(strategy, model, roles=roles))
    assert everything(model) == before


def test_what_is_compared_sees_a_change() -> None:
    for change in (
        lambda model: setattr(model.blocks[1], "down", nn.Identity()),
        lambda model: setattr(model.blocks[1], "forward", len),
        lambda model: model.register_forward_pre_hook(lambda *_: None),
        lambda model: model.half(),
    ):
        model = AnyModule()
        before = everything(model)
        change(model)
        assert everything(model) != before


@pytest.mark.parametrize(
    "text",
    ["pp2,fsdp2", "fsdp4,tp2", "pp2,cp2,tp2", "pp3:interleaved/2", "dp2,ep2", "pp2,fsdp2,ep2"],
)
def test_a_plan_of_a_shape_answers_as_one_of_the_model(text: str) -> None:
    strategy = Strategy.parse(text)
    shape = EXPERTS if strategy.ep.degree > 1 else SHAPE
    with torch.device("meta"):
        model = Decoder(shape)
    plans = plan_decoder(strategy, shape), Plan(strategy, model)
    for pp_rank in range(strategy.pp.degree):
        one, other = (plan.for_pp_rank(pp_rank) for plan in plans)
        assert one.holds(4) == other.holds(4)
        assert one.traffic(MICROBATCHES) == other.traffic(MICROBATCHES)
        assert one.header_traffic(MICROBATCHES, []) == other.header_traffic(MICROBATCHES, [])
        assert one.table() == other.table()


def test_each_kind_of_block_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3 405B on 16,384 ranks: one block is made, and nine layers of tp run on shapes."""
    made: list[int] = []
    own = Block.__init__

    @functools.wraps(own)
    def noted(self: Block, shape: ModelShape, index: int) -> None:
        made.append(index)
        own(self, shape, index)

    monkeypatch.setattr(Block, "__init__", noted)
    account._entries.cache_clear()
    strategy = Strategy.parse("pp16,fsdp128,tp8")
    assert strategy.num_ranks == 16_384
    plan = plan_decoder(strategy, shape_of("llama3-405b"), compute=torch.bfloat16)
    for pp_rank in range(16):
        of = plan.for_pp_rank(pp_rank)
        of.traffic([(1, 8192)] * 32)
        of.holds(32)
        of.table()
    assert made == [0]
    # Embedding, queries with keys and values, their projection, gate with up, down, output, loss;
    # and norms, whose weights fsdp gathers in bfloat16 in blocks alone.
    assert account._entries.cache_info().misses == 9
    assert not torch.distributed.is_initialized()
