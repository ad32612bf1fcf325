"""Frozen experts, routers and dense weights, some in a narrower type, beside one process."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches, split

SHAPE = ModelShape(
    vocab_size=68, num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=16,
    experts=ExpertShape(num_experts=4, top_k=2, ffn=12, shared_ffn=8, aux_loss=0.1),
)  # fmt: skip

FROZEN: dict[str, tuple[str, ...]] = {
    "experts": ("mlp.experts.",),
    "router": ("mlp.router.",),
    "dense": ("attention", "mlp_norm", "router", "shared"),
    "all of block 0": ("blocks.0.",),
}
"""What is frozen -> parts of the names of its parameters."""

Kind = Literal["adamw", "muon"]


def trained(
    text: str, frozen: str, narrow: torch.dtype, kind: Kind
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Return loss and norm of three steps in float64, and the whole weights after them."""
    strategy = Strategy.parse(text)
    comm, model = Ranks(strategy), Decoder(SHAPE).double()
    model.initialize(3)
    for name, parameter in model.named_parameters():
        if any(part in name for part in FROZEN[frozen]):
            parameter.requires_grad_(False).data = parameter.data.to(narrow)
    runner = Plan(strategy, model).build(comm)
    config = OptimizerConfig(kind=kind, lr=1e-2, warmup_steps=0)
    step = Step(
        model, build_optimizer(model, config, comm), NextToken(3, 0.0), config,
        comm=comm, num_steps=3, run=runner,
    )  # fmt: skip
    batches = decoder_batches(SHAPE, 3, 9, 11, 0, 3)
    results = [step(split(batch, comm.coord("data"), comm.size("data"), 2)) for batch in batches]
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return [(r.loss, r.grad_norm) for r in results], {
        n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()
    }


CASES: list[tuple[str, torch.dtype, Kind]] = [
    ("experts", torch.float32, "adamw"),
    ("router", torch.float64, "muon"),
    ("dense", torch.float32, "muon"),
    ("all of block 0", torch.float32, "adamw"),
]


def all_trained(text: str) -> list[tuple[list[tuple[float, float]], dict[str, Tensor]]]:
    return [trained(text, *case) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["ep2", "fsdp2,ep2", "fsdp2:zero1,ep2"])
def test_frozen_parts_equal_one_process(text: str) -> None:
    alone = run_ranks(all_trained, 1, "dp1", threads=1)[0]
    ranks = run_ranks(all_trained, Strategy.parse(text).num_ranks, text, threads=1)
    for case, (steps, weights), (right, expected) in zip(CASES, ranks[0], alone, strict=True):
        for found, wanted in zip(steps, right, strict=True):
            assert found == pytest.approx(wanted, rel=1e-12), case
        for name, weight in expected.items():
            is_frozen = any(part in name for part in FROZEN[case[0]])
            assert weights[name].dtype == weight.dtype == (case[1] if is_frozen else torch.float64)
            close = {"rtol": 0.0, "atol": 0.0 if is_frozen else 1e-12}
            torch.testing.assert_close(weights[name], weight, **close, msg=f"{case}: {name}")


def gathered(text: str) -> list[set[Entry]]:
    """Return what fsdp sends in a step of bfloat16 with frozen weights, and what is planned."""
    strategy = Strategy.parse(text)
    comm, model = Ranks(strategy), Decoder(SHAPE)
    model.initialize(3)
    model.compute_dtype = torch.bfloat16
    for name, parameter in model.named_parameters():
        if any(part in name for part in (*FROZEN["dense"], "attention_norm")):
            parameter.requires_grad_(False).data = parameter.data.bfloat16()
    plan = Plan(strategy, model, compute=torch.bfloat16)
    runner = plan.build(comm)
    ids = torch.randint(68, (2, 12), generator=torch.Generator().manual_seed(comm.rank))
    predicted = plan.traffic([(2, 11)])
    assert runner.reducer is not None
    with Ledger(comm) as ledger:
        runner.reducer.before_backward(runner.reducer.parameters)
        with ledger.phase("forward"):
            loss = model(ids[:, :-1], ids[:, 1:])
        with ledger.phase("backward"):
            loss.backward()
    of_fsdp = ("forward", "backward")
    return [
        {e for e in each if e.phase in of_fsdp and e.axis.startswith("fsdp")}
        for each in (ledger.entries(), predicted)
    ]


@pytest.mark.slow
def test_trained_experts_are_gathered_as_planned_beside_frozen_bfloat16() -> None:
    for found, right in run_ranks(gathered, 4, "fsdp2,ep2", threads=1):
        assert {e.axis for e in found} == {"fsdp", "fsdp_ep"}
        assert found == right
