"""What a watch sees: also the inside of an operator that is registered as a composite."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.watch import COMPOSITES, Watch, active, register_composite, unwatched
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import CollectiveMismatch
from phalanx.launch.local import run_ranks
from phalanx.measure.memory import MemoryLedger
from phalanx.strategy import Strategy

SIZE = 100
BYTES = 4 * SIZE * SIZE


def multiply_and_sum(a: Tensor, b: Tensor) -> Tensor:
    out = a @ b
    dist.all_reduce(out)
    return out


NAME = "phalanx_tensor::multiply_and_sum_in_a_test"
custom = torch.library.custom_op(NAME, multiply_and_sum, mutates_args=())
OPERATOR = torch.ops.phalanx_tensor.multiply_and_sum_in_a_test.default


def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return grad @ b.T, a.T @ grad


custom.register_autograd(backward, setup_context=keep)
register_composite(OPERATOR, multiply_and_sum)


def block(a: Tensor, b: Tensor) -> Tensor:
    return custom(a, b).square().sum()  # square reads the product again in backward


def policy(kept: CheckpointPolicy, _: Any, operator: Any, *args: Any) -> CheckpointPolicy:
    return kept if operator is OPERATOR else CheckpointPolicy.PREFER_RECOMPUTE


def run_block(kept: CheckpointPolicy | None) -> tuple[list[Entry], list[Entry], int, int]:
    """Return what ledgers counted, alone and below two other watches, and what those saw."""
    comm = Ranks(Strategy.parse("dp2"))
    run = block
    if kept is not None:
        contexts = functools.partial(
            create_selective_checkpoint_contexts, functools.partial(policy, kept)
        )
        run = functools.partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    a, b = (torch.full((SIZE, SIZE), 0.1, requires_grad=True) for _ in range(2))

    def step(ledger: Ledger) -> Tensor:
        with ledger.phase("forward"):
            loss = run(a, b)
        with ledger.phase("backward"):
            loss.backward()
        return loss

    with Ledger(comm) as alone:
        loss = step(alone)
    assert float(loss.detach()) == pytest.approx(SIZE * SIZE * (2 * SIZE * 0.01) ** 2, rel=1e-5)
    memory = MemoryLedger(nn.Identity(), torch.optim.SGD([torch.ones(1)]), "cpu")
    with CollectiveCheck(comm) as check, Ledger(comm) as below, memory:
        step(below)
    communication = memory.account().at_most["communication"]
    return alone.entries(), below.entries(), sum(check._numbers.values()), communication


@pytest.mark.parametrize(
    ("kept", "num_again"),
    [(None, 0), (CheckpointPolicy.MUST_SAVE, 0), (CheckpointPolicy.PREFER_RECOMPUTE, 1)],
)
def test_what_a_composite_sends_is_counted_by_every_watch(
    kept: CheckpointPolicy | None, num_again: int
) -> None:
    again = [Entry("backward", "dp", "all_reduce", 1, BYTES, float(BYTES))] * num_again
    for alone, below, num_checked, communication in run_ranks(run_block, 2, kept):
        assert alone == [Entry("forward", "dp", "all_reduce", 1, BYTES, float(BYTES)), *again]
        assert below == alone
        assert num_checked == 1 + num_again
        # The product, which is made inside; gloo's thread may hold the first one a little longer.
        assert communication in {BYTES * times for times in range(1, 2 + num_again)}


def differ_inside() -> None:
    size = 2 + dist.get_rank()
    with CollectiveCheck(Ranks(Strategy.parse("dp2"))):
        custom(torch.ones(size, size), torch.ones(size, size))


def test_a_collective_that_differs_inside_is_told_where_the_composite_is_called() -> None:
    with pytest.raises(CollectiveMismatch, match=r"shape: \[2x2\] and \[3x3\]") as caught:
        run_ranks(differ_inside, 2)
    assert "test_watch.py" in str(caught.value) and "in differ_inside" in str(caught.value)


def leave_as_it_was() -> None:
    """An error inside a composite leaves the modes as they were."""
    watch = Watch()
    with Ledger(Ranks(Strategy.parse("dp1"))) as ledger, watch:
        assert active() == [watch]
        with pytest.raises(RuntimeError):
            custom(torch.ones(2, 2), torch.ones(3, 3))
        custom(torch.ones(2, 2), torch.ones(2, 2))
    assert active() == []
    custom(torch.ones(2, 2), torch.ones(2, 2))
    assert [entry.calls for entry in ledger.entries()] == [1]
    del COMPOSITES[OPERATOR]
    with Watch():
        with pytest.raises(NotImplementedError, match="multiply_and_sum_in_a_test"):
            custom(torch.ones(2, 2), torch.ones(2, 2))


def test_after_an_error_and_without_an_implementation() -> None:
    run_ranks(leave_as_it_was, 1)


def gathered_under_two_watches(shares_memory: bool) -> list[list[tuple[str, int]]]:
    comm = Ranks({"dp": 2}, shares_memory=shares_memory)
    with Ledger(comm) as outer, Ledger(comm) as inner:
        comm.all_gather(torch.ones(SIZE), "dp", 0)
        dist.all_reduce(torch.ones(SIZE))
        with unwatched():
            dist.all_reduce(torch.ones(SIZE))
    return [[(e.op, e.calls) for e in each.entries()] for each in (outer, inner)]


@pytest.mark.parametrize("shares_memory", [True, False])
def test_each_watch_sees_a_call_of_an_engine_once_and_none_of_its_messages(
    shares_memory: bool,
) -> None:
    for seen in run_ranks(gathered_under_two_watches, 2, shares_memory):
        assert seen == [[("all_gather", 1), ("all_reduce", 1)]] * 2


def names_of_operators(has_ledger: bool) -> list[str]:
    comm, layer = Ranks({"dp": 2}, shares_memory=False), nn.Linear(2, 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with Ledger(comm) if has_ledger else nullcontext():
            layer(torch.ones(2, 2)).sum().backward()
            dist.all_reduce(torch.ones(2))
            funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", comm.mesh.get_group("dp")))
    return sorted(event.name for event in profiled.events() or () if "gloo" not in event.name)


def test_a_profiler_sees_the_same_operators_under_a_ledger() -> None:
    alone, watched = (run_ranks(names_of_operators, 2, each)[0] for each in (False, True))
    assert "aten::addmm" in alone and "c10d::allreduce_" in alone
    assert watched == alone
