"""Matrices at their owners: equal to the bit to whole ones, even over ranks, bytes as stated.

That a step of training with Muon is what one process computes is in tests/verify.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.comm import Ranks, SingleRankComm, local_shard
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry, Ledger
from phalanx.launch.local import run_ranks
from phalanx.parallel import whole_matrix
from phalanx.parallel.plan import Plan, shard_of
from phalanx.parallel.whole_matrix import Matrix, Owners
from phalanx.strategy import Strategy
from phalanx.train import optimizer as optimizers
from phalanx.train.optimizer import Muon, bind, newton_schulz_flops


class Net(nn.Module):
    """Matrices of several shapes, one with fewer rows than ranks, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide, self.tall = nn.Linear(24, 6, bias=False), nn.Linear(5, 11, bias=False)
        self.row = nn.Linear(9, 1, bias=False)
        self.square = nn.Linear(8, 8, bias=False)
        self.stack = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x


def gradient_of(name: str, shape: Sequence[int], step: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step * 100 + len(name)))


def whole_after(num_steps: int, **settings: Any) -> dict[str, Tensor]:
    """Return what torch.optim.Muon makes of the weights on one process, a stack by its matrices."""
    weights = dict(Net().named_parameters())
    stack = weights.pop("stack")
    experts = [nn.Parameter(each.clone()) for each in stack.detach()]
    optimizer = torch.optim.Muon([*weights.values(), *experts], 0.1, **settings)
    for step in range(num_steps):
        for name, weight in weights.items():
            weight.grad = gradient_of(name, weight.shape, step)
        for expert, gradient in zip(experts, gradient_of("stack", stack.shape, step), strict=True):
            expert.grad = gradient
        optimizer.step()
    return {**weights, "stack": torch.stack([*experts])}


def stepped(text: str, num_steps: int, **settings: Any) -> tuple[dict[str, bool], Any, Any]:
    """Return which weights of this rank are equal to the bit, the bytes sent, and those stated."""
    strategy = Strategy.parse(text)
    comm, model = Ranks(strategy), Net()
    Plan(strategy, model).build(comm)
    optimizer = Muon(model.parameters(), 0.1, **settings)
    bind(optimizer, comm)
    ledger = Ledger(comm)
    for step in range(num_steps):
        for name, parameter in model.named_parameters():
            whole = gradient_of(name, parameter.shape, step)
            parameter.grad = like(parameter, whole)
        with ledger, ledger.phase("optimizer"):
            optimizer.step()
    expected = whole_after(num_steps, **settings)
    equal: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        shard, offset = shard_of(parameter)
        here = tuple(slice(o, o + n) for o, n in zip(offset, shard.shape, strict=True))
        equal[name] = torch.equal(shard, expected[name].detach()[here])
    assert optimizer.owners is not None
    stated = optimizer.owners.traffic(range(5), 2)
    return equal, ledger.entries(), stated


def like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return a whole tensor as a shard like the parameter's."""
    gradient = torch.zeros_like(parameter, requires_grad=False)
    shard, offset = shard_of(gradient)
    shard.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, shard.shape, strict=True))])
    return gradient


def all_stepped(texts: Sequence[str], *cases: dict[str, Any]) -> list[Any]:
    return [stepped(text, 3, **case) for text in texts for case in cases]


@pytest.mark.parametrize(
    ("num_ranks", "texts"), [(2, ["dp2", "fsdp2", "fsdp2:zero1"]), (4, ["dp2,fsdp2", "fsdp4"])]
)
def test_bits_and_bytes(num_ranks: int, texts: list[str]) -> None:
    case = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.2}
    for rank in run_ranks(all_stepped, num_ranks, texts, case):
        for equal, sent, stated in rank:
            assert all(equal.values()), equal
            assert stated
            thrice = [
                Entry(*_key(e), 3 * e.calls, 3 * e.payload_bytes, 3 * e.sent_bytes) for e in stated
            ]
            assert sent == thrice


def _key(entry: Entry) -> tuple[str, str, str]:
    return entry.phase, entry.axis, entry.op


def rounds_of_one_matrix() -> tuple[dict[str, bool], int]:
    with patch.object(whole_matrix, "ROUND_BYTES", 1):
        equal, sent, _ = stepped("fsdp2", 1)
        return equal, sum(e.calls for e in sent)


def test_rounds_bound_what_an_owner_holds() -> None:
    for equal, calls in run_ranks(rounds_of_one_matrix, 2):
        assert all(equal.values())
        assert calls > 2  # a gather and a scatter for each round


def by_rows(right: Any) -> Any:
    """Newton-Schulz of each half of the rows, as on shards."""

    def wrong(matrix: Tensor, *how: Any) -> Tensor:
        return torch.cat([right(half, *how) for half in matrix.chunk(2)])

    return wrong


def of_another(right: Any) -> Any:
    """Owners that give the update of another matrix of the same shape."""

    def wrong(self: Owners, each: Any, wholes: dict[Matrix, Tensor], dtype: Any) -> Any:
        shapes = collections.defaultdict[Any, list[Matrix]](list)
        for matrix in wholes:
            shapes[matrix.shape].append(matrix)
        turned = {m: of[n - 1] for of in shapes.values() for n, m in enumerate(of)}
        return right(self, each, {m: wholes[turned[m]] for m in wholes}, dtype)

    return wrong


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "Newton-Schulz by rows": (optimizers, "orthogonalize", by_rows),
    "wrong owner": (Owners, "scatter", of_another),
}


def planted(name: str) -> dict[str, bool]:
    owner, attribute, make = FAULTS[name]
    with patch.object(owner, attribute, make(getattr(owner, attribute))):
        return stepped("fsdp2", 1)[0]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Newton-Schulz by rows", {"wide.weight", "tall.weight", "square.weight", "stack"}),
        ("wrong owner", {"stack"}),
    ],
)
def test_a_planted_fault_changes_the_weights(name: str, wrong: set[str]) -> None:
    found = {n for equal in run_ranks(planted, 2, name) for n, same in equal.items() if not same}
    assert found == wrong


def on_meta(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]


def rows(parameters: Sequence[Tensor]) -> list[list[range]]:
    return [optimizers.matrices_of(parameter.shape, {}) for parameter in parameters]


def test_work_is_even() -> None:
    """30 layers of a Llama over 8 replicas: no owner has 5 % more than the mean."""
    shapes = [(512, 512), (128, 512), (128, 512), (512, 512), (1408, 512), (1408, 512), (512, 1408)]
    parameters = on_meta(shapes * 30)
    comm = CountingComm({"dp": 4, "fsdp": 2})
    owners = Owners(comm, parameters, rows(parameters), newton_schulz_flops)
    work = collections.Counter[Any]()
    for matrix in owners.matrices:
        work[tuple(matrix.owner.values())] += newton_schulz_flops(matrix.shape)
    assert len(work) == 8
    assert max(work.values()) <= 1.05 * sum(work.values()) / 8


def test_one_rank_sends_nothing() -> None:
    parameters = on_meta([(4, 3), (2, 4, 3)])
    owners = Owners(SingleRankComm(), parameters, rows(parameters))
    assert [matrix.shape for matrix in owners.matrices] == [(4, 3), (1, 4, 3), (1, 4, 3)]
    assert owners.traffic(range(2), 2) == []


def experts_at_owners(texts: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for text in texts:
        comm, model = Ranks(Strategy.parse(text)), Net()
        Plan(Strategy.parse(text), model).build(comm)
        owners = Owners(comm, [model.stack], rows([model.stack]))
        here = len(local_shard(model.stack))
        mine = [m for m in owners.matrices if m.owner["fsdp"] == comm.coord("fsdp")]
        found.append((here, len(mine), owners.traffic([0], 2)))
    return found


def test_an_expert_that_a_rank_holds_whole_stays_there() -> None:
    for rank in run_ranks(experts_at_owners, 2, ["fsdp2"]):
        for here, mine, traffic in rank:
            assert here == mine
            assert traffic == []
