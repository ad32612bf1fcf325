"""Outputs of gathers that ranks have in common: nobody overwrites one that a rank still needs."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.comm.channels import NUM_BUFFERS, Channels, SharedRank, reserve
from phalanx.comm.comm import Ranks
from phalanx.comm.heap import Heap
from phalanx.comm.shared_memory import SMALL_BYTES, SharedMemory
from phalanx.comm.shared_transfer import UNDER_WAY, SharedTransfer
from phalanx.comm.transfer import Transfer
from phalanx.launch.local import run_ranks
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy

SHAPE = ModelShape(
    vocab_size=96, num_layers=3, hidden=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn=48,
    max_seq_len=16,
)  # fmt: skip
NUM_RANKS = 3
LENGTH = SMALL_BYTES // 4
SIZES = [[LENGTH], [LENGTH, 2 * LENGTH, 4 * LENGTH], [3 * LENGTH, LENGTH]]
"""Elements of a rank's input in one call after another, in turns."""
CPU = torch.device("cpu")


class _Rank:
    """A rank of a group whose ranks are all in this process, and take steps as a test says."""

    def __init__(self, coord: int, engine: SharedMemory, memory: Heap, words: int) -> None:
        self.coord, self.engine, self.memory, self.words = coord, engine, memory, words
        self.num_calls = 0
        self.running: list[tuple[int, Tensor, SharedTransfer]] = []
        self.held: list[tuple[int, Tensor]] = []

    def call(self, lengths: list[int]) -> None:
        """Start the next gather: its inputs have the call's number and the rank's."""
        length = lengths[self.num_calls % len(lengths)]
        out = self.engine.gather_output([NUM_RANKS, length], torch.float32, CPU)
        out[self.coord] = 10 * self.num_calls + self.coord
        given = out[self.coord]
        transfer = self.engine.run("all_gather", out, given, is_spent=True)
        assert isinstance(transfer, SharedTransfer)
        self.running.append((self.num_calls, out, transfer))
        self.num_calls += 1

    def advance(self) -> None:
        """Advance the oldest gather that runs; check its output if it has ended."""
        if self.running and self.running[0][2].advance() is None:
            call, out, _ = self.running.pop(0)
            self.held.append((call, out))
            self.check()

    def check(self) -> None:
        for call, out in self.held:
            assert [row.unique().tolist() for row in out] == [
                [10 * call + coord] for coord in range(NUM_RANKS)
            ]

    def free(self, which: int) -> None:
        """Free one of the outputs that are held."""
        if self.held:
            self.check()
            del self.held[which % len(self.held)]

    @property
    def is_common(self) -> bool:
        """Whether the latest output is in a buffer that the ranks have in common."""
        return self.engine._gather_buffers.holds(self.held[-1][1])


@contextmanager
def _ranks() -> Generator[list[_Rank]]:
    heaps = [Heap() for _ in range(NUM_RANKS)]
    words = [reserve(heap, NUM_RANKS) for heap in heaps]
    members = [
        SharedRank(rank, os.getpid(), heap, first)
        for rank, (heap, (first, _)) in enumerate(zip(heaps, words, strict=True))
    ]
    made: list[_Rank] = []
    for coord, (heap, (_, kept)) in enumerate(zip(heaps, words, strict=True)):
        channels = Channels(members, coord, lambda: 60.0)
        made.append(_Rank(coord, SharedMemory(MagicMock(), channels, heap, kept), heap, id(kept)))
    try:
        yield made
    finally:
        UNDER_WAY.clear()


def _finish(ranks: list[_Rank]) -> None:
    while any(rank.running for rank in ranks):
        for rank in ranks:
            rank.advance()


def _catch_up(ranks: list[_Rank], lengths: list[int], num_calls: int) -> None:
    """Let all ranks make `num_calls` calls, and finish them."""
    for rank in ranks:
        while rank.num_calls < num_calls:
            rank.call(lengths)
    _finish(ranks)


def _in_step(ranks: list[_Rank], lengths: list[int]) -> list[bool]:
    """Gather on all ranks, which hold no output but that; return whose is in a common buffer."""
    _catch_up(ranks, lengths, ranks[0].num_calls + 1)
    found = [rank.is_common for rank in ranks]
    for rank in ranks:
        rank.free(0)
    return found


ACTIONS = st.tuples(
    st.sampled_from(["call", "call", "advance", "free", "gather"]),
    st.integers(0, NUM_RANKS - 1),
    st.integers(0, 7),
)


@given(st.lists(ACTIONS, max_size=120), st.sampled_from(SIZES))
def test_held_outputs_stay_as_they_are_and_buffers_return(
    actions: list[tuple[str, int, int]], lengths: list[int]
) -> None:
    with _ranks() as ranks:
        for action, coord, which in actions:
            rank = ranks[coord]
            # The first rank chooses the memory of a new buffer, for which the others wait.
            is_ahead = coord > 0 and rank.num_calls == ranks[0].num_calls
            if action == "call" and not is_ahead and len(rank.running) < 4:
                rank.call(lengths)
            elif action == "advance":
                rank.advance()
            elif action == "free":
                rank.free(which)
            elif action == "gather":
                _catch_up(ranks, lengths, ranks[0].num_calls + 1)
                for each in ranks:
                    if which & 1 << each.coord:
                        each.free(-1)
        _catch_up(ranks, lengths, ranks[0].num_calls)
        for rank in ranks:
            while rank.held:
                rank.free(0)
        for _ in range(4):  # who took memory of its own frees that once others have read it
            found = _in_step(ranks, lengths)
        assert found == [True] * NUM_RANKS


def _gather(ranks: list[_Rank]) -> None:
    """Gather on all ranks, which hold the outputs."""
    for rank in ranks:
        rank.call([LENGTH])
    _finish(ranks)


def test_an_output_that_one_rank_holds_makes_all_take_memory_of_their_own() -> None:
    with _ranks() as ranks:
        _gather(ranks)
        holder, *others = reversed(ranks)
        for rank in others:
            rank.free(0)
        found: list[bool] = []
        for _ in range(4):  # a buffer is due at every second call
            _gather(ranks)
            found += {rank.is_common for rank in ranks}
            for rank in ranks:
                rank.free(-1)
        assert found == [True, False, True, False]
        holder.free(0)
        for _ in range(2):
            _gather(ranks)
            assert all(rank.is_common for rank in ranks)


def test_a_rank_that_copies_out_of_a_buffer_keeps_it_from_the_others() -> None:
    with _ranks() as ranks:
        first, copying, holder = ranks
        _gather(ranks)
        first.free(0)
        copying.free(0)
        _gather(ranks)
        copying.call([LENGTH])
        holder.free(0)
        for rank in (holder, first):
            rank.call([LENGTH])
        for rank in (first, holder):
            while len(rank.running):
                rank.advance()
            assert rank.is_common
            rank.free(-1)
            for _ in range(2):  # the second is due to be in the buffer of the call before
                rank.call([LENGTH])
        copying.advance()
        assert not copying.is_common


def test_buffers_of_many_sizes_take_the_memory_of_two_of_the_largest() -> None:
    with _ranks() as ranks:
        lengths = [LENGTH * (1 + number % 10) for number in range(25)]
        assert all(all(_in_step(ranks, lengths)) for _ in lengths)
        buffers = ranks[0].engine._gather_buffers._buffers
        assert sum(buffer.num_bytes for buffer in buffers) <= NUM_BUFFERS * max(lengths) * 12
        blocks = {id(buffer.kept) for buffer in buffers}
        assert {id(block) for block in ranks[0].memory._blocks.values()} - {
            ranks[0].words
        } == blocks


def test_without_memory_for_a_larger_buffer_each_rank_takes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _ranks() as ranks:
        block, lacks = ranks[0].memory.block, [True]

        def no_memory_at_first(num_bytes: int) -> object:
            if lacks:
                lacks.clear()
                raise OSError("no memory")
            return block(num_bytes)

        monkeypatch.setattr(ranks[0].memory, "block", no_memory_at_first)
        found = [_in_step(ranks, [LENGTH]) for _ in range(3)]
        assert found == [[False] * NUM_RANKS, [True] * NUM_RANKS, [True] * NUM_RANKS]


def gathers_of_steps() -> list[bool]:
    """Return of each gather of three steps whether its output is in a common buffer."""
    strategy = Strategy.parse("fsdp2")
    comm = Ranks(strategy, shares_memory=True)
    engine = comm.engine("fsdp")
    assert isinstance(engine, SharedMemory)
    plan = plan_decoder(strategy, SHAPE)
    model = plan.model.train()
    runner = plan.build(comm, partial(fill_initial, SHAPE, 5))
    tokens = torch.randint(0, SHAPE.vocab_size, (4, SHAPE.max_seq_len + 1))
    found: list[bool] = []
    run = engine.run

    def noted(op: str, out: Tensor, *args: Any) -> Transfer:
        if op == "all_gather" and out.nbytes > SMALL_BYTES:
            found.append(engine._gather_buffers.holds(out))
        return run(op, out, *args)

    with patch.object(engine, "run", noted):
        for _ in range(3):
            runner(
                [tokens[:2], tokens[2:]],
                lambda batch: model(batch[:, :-1], batch[:, 1:]),
                lambda loss: loss / 64,
            )
    return found


def test_a_step_of_fsdp_copies_nothing_between_ranks() -> None:
    for found in run_ranks(gathers_of_steps, 2, threads=1):
        # In each microbatch, forward gathers three blocks, and backward two of them again.
        assert found == [True] * 3 * 2 * 5
