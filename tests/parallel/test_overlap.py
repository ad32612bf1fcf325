"""fsdp's collectives on a CPU travel while blocks compute, and change no bit of what they carry."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from marks import by_hand
from phalanx.comm import exchange
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.fsdp import LastReduction, ShardGather
from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.transfer import Transfer
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches
from phalanx.verify.record import split

WIDTH, NUM_BLOCKS = 512, 4
SHAPE = ModelShape(
    vocab_size=67,
    num_layers=4,
    hidden=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn=24,
    max_seq_len=16,
    tied=False,
)


class Block(nn.Module):
    """Each of another size, so that what travels can be told by its length."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 8 * index, bias=False)
        self.down = nn.Linear(WIDTH + 8 * index, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Blocks(nn.Module):
    """May use blocks more than once, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index) for index in range(NUM_BLOCKS))

    @override
    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(NUM_BLOCKS))) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x.sum()


SIZES = {2 * WIDTH * (WIDTH + 8 * index): index for index in range(NUM_BLOCKS)}
"""Elements of a block -> its index."""

NOT_THERE = float("nan")


class Timeline:
    """Notes when transfers begin and are waited for, and when gathers arrive, by themselves."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gathered: dict[int, Tensor] = {}
        self._gather, self._reduce = exchange.all_gather_start, exchange.reduce_scatter_start

    @contextmanager
    def noting(self) -> Generator[None]:
        with (
            patch.object(exchange, "all_gather_start", self._begin_gather),
            patch.object(exchange, "reduce_scatter_start", self._begin_reduce),
        ):
            yield

    def arrive(self, index: int) -> None:
        """Stand still in a block until another one's parameters are there.

        Nobody has waited for them, so only a thread of gloo can have brought them.
        """
        deadline_s = time.monotonic() + 60
        while self.gathered[index].isnan().any():
            assert time.monotonic() < deadline_s, f"block {index} has not arrived; {self.events}"
            time.sleep(1e-3)
        self.events.append(f"arrived {index}")

    def _begin_gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Transfer:
        index, mine = SIZES[output.numel()], shard.clone()
        output.fill_(NOT_THERE)
        shard.copy_(mine)  # a slice of the output
        self.gathered[index] = output
        return self._noted("gather", index, self._gather(output, shard, group))

    def _begin_reduce(self, output: Tensor, full: Tensor, group: dist.ProcessGroup) -> Transfer:
        return self._noted("reduce", SIZES[full.numel()], self._reduce(output, full, group))

    def _noted(self, what: str, index: int, transfer: Transfer) -> Transfer:
        self.events.append(f"begin {what} {index}")
        wait = transfer.wait

        def noted_wait(*args: Any) -> bool:
            self.events.append(f"wait {what} {index}")
            return wait(*args)

        transfer.wait = noted_wait
        return transfer


def events_of_a_step() -> list[str]:
    timeline, model = Timeline(), Blocks()
    strategy = Strategy.parse("fsdp2")
    comm = Ranks(strategy, shares_memory=False)  # gloo has a thread that gathers meanwhile
    reducer = Plan(strategy, model).build(comm).reducer
    assert reducer is not None

    def stand(what: str, index: int, coming: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            timeline.events.append(f"{what} {index}")
            if coming in range(NUM_BLOCKS):
                timeline.arrive(coming)

        return hook

    for index, block in enumerate(model.blocks):
        block.up.register_forward_pre_hook(stand("begin forward", index, index + 1))
        block.down.register_forward_hook(stand("end forward", index, -1))
        # The last block stays gathered, so block 2 is the first that backward gathers again.
        block.down.register_full_backward_pre_hook(stand("begin backward", index, index - 1))
        block.up.register_full_backward_hook(stand("end backward", index, -1))
    with timeline.noting():
        loss = model(torch.ones(2, WIDTH).requires_grad_())
        reducer.before_backward(reducer.parameters)
        loss.backward()
    timeline.events.append("end of backward")
    assert all(p.grad is not None for p in model.parameters())
    return timeline.events


def test_a_block_is_gathered_while_the_one_before_it_computes() -> None:
    for events in run_ranks(events_of_a_step, 2, threads=1):
        at = {event: number for number, event in enumerate(events)}
        first = {event: events.index(event) for event in events}
        for index in range(NUM_BLOCKS - 1):
            after = index + 1
            assert first[f"begin gather {after}"] < at[f"begin forward {index}"]
            assert at[f"begin forward {index}"] < first[f"arrived {after}"]
            assert first[f"arrived {after}"] < at[f"end forward {index}"]
            assert at[f"end forward {index}"] < first[f"wait gather {after}"]
        for index in (1, 2):
            assert events.count(f"begin gather {index}") == 2
            assert at[f"begin gather {index}"] < at[f"begin backward {index + 1}"]
            assert at[f"arrived {index}"] < at[f"end backward {index + 1}"]
            assert at[f"end backward {index + 1}"] < at[f"wait gather {index}"]
        for index in range(1, NUM_BLOCKS):
            assert at[f"begin reduce {index}"] < at[f"begin backward {index - 1}"]
            assert at[f"end backward {index - 1}"] < at[f"wait reduce {index}"]
            assert at[f"wait reduce {index}"] < at[f"begin reduce {index - 1}"]
        assert at["wait reduce 0"] < at["end of backward"]


def trained(text: str, num_microbatches: int) -> tuple[list[float], list[Tensor], bool]:
    """Return losses, shards of the weights, and whether the ledger saw what was predicted."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    with torch.device("meta"):
        model = Decoder(SHAPE)
    plan = Plan(strategy, model)
    rows = 8 // strategy.data_ranks // num_microbatches
    predicted = plan.traffic([(rows, 12)] * num_microbatches)
    runner = plan.build(comm, lambda *a: fill_initial(SHAPE, 5, *a))
    config = OptimizerConfig(warmup_steps=0)
    step = Step(
        model, build_optimizer(model, config), NextToken(), config,
        comm=comm, num_steps=20, run=runner,
    )  # fmt: skip
    place, losses, entries = comm.coord("data"), list[float](), list[Entry]()
    for batch in decoder_batches(SHAPE, 2, 8, 12, strategy.data_ranks, 1):
        with Ledger(comm) as ledger, step.watched(ledger.phase):
            losses.append(step(split(batch, place, strategy.data_ranks, num_microbatches)).loss)
        entries = [e for e in ledger.entries() if e.phase not in ("count", "metrics", "clip")]
    weights = [local_shard(parameter).detach() for parameter in model.parameters()]
    return losses, weights, set(entries) == set(predicted)


def trained_both_ways(cases: list[tuple[str, int]]) -> list[tuple[int, bool, bool]]:
    """Return for each case the transfers left under way, and whether the two ways agree."""
    gather, leave, found = ShardGather.__call__, LastReduction.leave, []

    def gather_and_wait(self: Any, *args: Any, **kwargs: Any) -> Transfer | None:
        transfer = gather(self, *args, **kwargs)
        assert transfer is not None
        transfer.wait()
        return transfer

    for text, num_microbatches in cases:
        left: list[Transfer] = []

        def note_and_leave(self: LastReduction, transfer: Transfer, left=left) -> None:
            left.append(transfer)
            leave(self, transfer)

        with patch.object(LastReduction, "leave", note_and_leave):
            losses, weights, is_predicted = trained(text, num_microbatches)
        with (
            patch.object(ShardGather, "__call__", gather_and_wait),
            patch.object(LastReduction, "leave", lambda _, transfer: transfer.wait()),
        ):
            expected, expected_weights, _ = trained(text, num_microbatches)
        is_equal = losses == expected and all(map(torch.equal, weights, expected_weights))
        found.append((len(left), is_predicted, is_equal))
    return found


# Two steps of six groups: four blocks, the embedding, the head. Where a sum is there already, or
# is all-reduced over dp, a reduction is waited for at once.
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (
            2,
            {
                ("fsdp2", 2): 12,
                ("fsdp2:zero2", 2): 12,
            },
        ),
        by_hand(2, {("fsdp2:zero1", 2): 12, ("fsdp2,recompute:full", 1): 12}),
        by_hand(2, {("fsdp2", 1): 12, ("fsdp2,recompute:every/2", 1): 12}),
        by_hand(4, {("dp2,fsdp2:zero2", 2): 0, ("fsdp2,tp2", 1): 12}),
        by_hand(4, {("dp2,fsdp2", 1): 0}),
    ],
)
def test_overlap_changes_no_bit_and_no_byte(
    num_ranks: int, cases: dict[tuple[str, int], int], subtests: pytest.Subtests
) -> None:
    for found in run_ranks(trained_both_ways, num_ranks, list(cases), threads=1):
        for case, (num_left, is_predicted, is_equal) in zip(cases, found, strict=True):
            with subtests.test(case):
                assert num_left == cases[case]
                assert is_predicted
                assert is_equal


def gradients(order: tuple[int, ...], has_hook: bool) -> tuple[float, list[bool]]:
    """Return the error of the gradients, and whether a hook on a share's gradient saw it whole."""
    torch.manual_seed(0)
    alone, model = Blocks().double(), Blocks().double()
    model.load_state_dict(alone.state_dict())
    reducer = Plan(Strategy.parse("fsdp2"), model).build(Ranks(Strategy.parse("fsdp2"))).reducer
    assert reducer is not None
    seen: list[tuple[nn.Parameter, Tensor]] = []
    if has_hook:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: seen.append((p, local_shard(p.grad).clone()))
            )
    xs = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss = model(xs[dist.get_rank()].clone().requires_grad_(), order)
    reducer.before_backward(reducer.parameters)
    loss.backward()
    reducer.finish()
    sum(alone(x, order) for x in xs).backward()
    error = 0.0
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        error = max(error, float((parameter.grad.full_tensor() - expected.grad).abs().max()))
    return error, [torch.equal(local_shard(p.grad), grad) for p, grad in seen]


def awkward() -> list[tuple[float, list[bool]]]:
    return [
        gradients((0, 1, 2, 3), has_hook=True),
        gradients((0, 1, 0, 1, 2, 3), has_hook=False),  # a block's second sum is added to its first
        gradients((3, 1, 2, 0), has_hook=False),
    ]


def test_blocks_in_any_order_more_than_once_and_under_hooks() -> None:
    for hooked, *others in run_ranks(awkward, 2, threads=1):
        assert hooked[1] == [True] * 2 * NUM_BLOCKS
        assert max(error for error, _ in (hooked, *others)) < 1e-9


def infer_in_part_then_load() -> bool:
    """Return whether a forward after new weights uses those, whatever was gathered before."""
    model = Blocks()
    Plan(Strategy.parse("fsdp2"), model).build(Ranks(Strategy.parse("fsdp2")))
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        model(x, (0, 1))  # block 2 is on its way, and not used
        for parameter in model.parameters():
            local_shard(parameter).zero_()
        return bool(model(x) == WIDTH)  # of blocks that add zero


def test_what_inference_leaves_out_does_not_grow_old() -> None:
    assert all(run_ranks(infer_in_part_then_load, 2, threads=1))
