"""What a profiler shows of a step: actions, phases, microbatches, collectives and their axes."""

from __future__ import annotations

import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.comm.ranges import named
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches, split

SHAPE = ModelShape(
    vocab_size=12, num_layers=2, hidden=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn=8,
    max_seq_len=8,
)  # fmt: skip
OF: dict[str, tuple[set[str], set[str]]] = {
    "pp2": (
        {"pp 0F1", "pp 0SEND_F1", "pp 0RECV_B0", "pp 0SENT_F1", "pp 0REDUCE1", "send pp"},
        {"pp 1F1", "pp 1RECV_F1", "pp 1B1", "pp 1SEND_B0", "recv pp", "wait recv pp"},
    ),
    "dp2": ({"microbatch 1", "gradient bucket 0", "all_reduce dp", "wait all_reduce dp"},) * 2,
    "fsdp2": (
        {"microbatch 0", "all_gather fsdp", "reduce_scatter fsdp", "FSDP::all_gather (blocks.0)"},
    )
    * 2,
    "tp2": ({"all_gather tp", "reduce_scatter tp"},) * 2,
    "cp2": ({"send cp", "recv cp", "wait recv cp"},) * 2,
}
"""Strategy -> what the trace of a step of two microbatches has on rank 0, and on rank 1."""


def names_of_a_step(texts: list[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for text in texts:
        strategy = Strategy.parse(text)
        comm, model = Ranks(strategy), Decoder(SHAPE)
        model.initialize(0)
        plan = Plan(strategy, model, pp_rank=comm.coord("pp"))
        run = plan.build(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = OptimizerConfig()
        step = Step(model, optimizer, NextToken(), config, comm=comm, num_steps=None, run=run)
        (batch,) = decoder_batches(SHAPE, 1, 4, 8, comm.size("data"), 0)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step(split(batch, comm.coord("data"), comm.size("data"), 2))
        names = {event.name for event in profiled.events() or ()}
        found[text] = names | {
            re.sub(r"( (blocks\.\d|rest))? [\d.e-]+ MiB$", "", name) for name in names
        }
    return found


@pytest.mark.parametrize("texts", [["pp2", "fsdp2"], by_hand(["dp2", "tp2", "cp2"])])
def test_a_trace_of_a_step_names_what_runs(texts: list[str]) -> None:
    ranks = run_ranks(names_of_a_step, 2, texts, threads=1)
    for text in texts:
        for of_rank, names in zip(ranks, OF[text], strict=True):
            assert names <= of_rank[text], (text, names - of_rank[text])
            assert {"forward", "backward", "clip", "optimizer"} <= of_rank[text]


def test_without_a_profiler_nothing_is_recorded() -> None:
    assert named("one") is named("other")
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(named("one"), record_function)
    assert named("one") is named("other")
