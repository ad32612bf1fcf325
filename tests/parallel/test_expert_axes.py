"""Parameters of two sets of axes, experts and all others, beside one process that holds both."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Ranks, local_shard
from phalanx.models.decoder import Decoder
from phalanx.models.experts import Experts
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel import experts
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import experts_of
from phalanx.strategy import Strategy
from phalanx.train.step import SINGLE

SHAPE = ModelShape(
    vocab_size=37, num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=16, experts=ExpertShape(num_experts=4, top_k=2, ffn=12, shared_ffn=8),
)  # fmt: skip

EXACT = 1e-10
ROWS, LENGTH, ACCUMULATION, STEPS = 10, 8, 2, 2


def fill(part: Tensor, name: str, whole: tuple[int, ...], offset: tuple[int, ...]) -> None:
    fill_initial(SHAPE, 5, part, name, whole, offset)


def exchanging(module: Experts, comm: Ranks) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a forward that sends rows to their experts and back, by torch's own collectives."""
    group, size = comm.mesh.get_group("ep"), comm.size("ep")

    def forward(rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        sent = counts_E.view(size, -1)  # [rank, expert of that rank]
        received = all_to_all_single(sent.contiguous(), None, None, group).view_as(sent)
        outward, inward = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = all_to_all_single_autograd(rows_MD, inward, outward, group)
        of_expert = torch.arange(sent.shape[1]).repeat(size).repeat_interleave(received.flatten())
        order = of_expert.argsort(stable=True)
        own = {name: local_shard(getattr(module, name)) for name in ("gate", "up", "down")}
        held: Any = SimpleNamespace(kind=module.kind, **own)
        out = Experts.forward(held, rows[order], received.sum(0))
        return all_to_all_single_autograd(out[order.argsort()], outward, inward, group)

    return forward


def place_and_exchange(model: nn.Module, comm: Ranks) -> None:
    place_experts(model, comm)
    for module in experts_of(model).values():
        assert isinstance(module, Experts)
        module.forward = exchanging(module, comm)


place_experts = experts.place_experts


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(strategy: Strategy) -> tuple[dict[str, Tensor], list[float], Any]:
    """Return full gradients and weights of the last step, norms, and the step with its ledger."""
    if strategy.num_ranks == 1:
        model, comm, run, predicted = Decoder(SHAPE).double(), Ranks({"dp": 1}), SINGLE, []
        model.initialize(5)
    else:
        comm = Ranks(strategy)
        with torch.device("meta"):
            model = Decoder(SHAPE).double()
        plan = Plan(strategy, model)
        rows = ROWS // strategy.data_ranks // ACCUMULATION
        predicted = plan.traffic([(rows, LENGTH)] * ACCUMULATION)
        with patch.object(experts, "place_experts", place_and_exchange):
            run = plan.build(comm, fill)
    return model, comm, run, predicted
