"""Each schedule as the ranks run it, against one process that holds the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.data.samples import Batch
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel import data
from phalanx.parallel.accumulate import Accumulate, Runner
from phalanx.parallel.pipeline import runtime
from phalanx.parallel.pipeline.partition import partition
from phalanx.parallel.pipeline.runtime import Pipeline
from phalanx.parallel.pipeline.schedule import Schedule, build_schedule
from phalanx.parallel.pipeline.stage import DecoderStages
from phalanx.train.objective import NextToken
from phalanx.verify.batches import decoder_batches, split

SHAPE = ModelShape(
    vocab_size=67, num_layers=7, hidden=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn=24,
    max_seq_len=32, dropout=0.1,
)  # fmt: skip
OF_ONE_CHUNK = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("zb", 1)]
KINDS = [*OF_ONE_CHUNK, ("interleaved", 2), ("zb", 2), ("zbv", 2), ("dualpipev", 2)]
"""Kind and chunks."""


def gradients(
    model: Decoder, run: Runner, microbatches: list[Batch], num_valid: int
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss that this rank sees and the gradients that it has."""
    objective = NextToken(0, SHAPE.dropout)
    total = torch.zeros((), dtype=torch.float64)

    def share_of(summed: Tensor) -> Tensor:
        total.add_(summed.detach())
        return summed / num_valid

    run(microbatches, lambda each: objective.loss_sum(model, each, 3), share_of)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(total / num_valid), found


def decoder() -> Decoder:
    model = Decoder(SHAPE).double()
    model.initialize(1)
    return model.train()


def schedule_of(kind: str, num_ranks: int, chunks: int, num_microbatches: int) -> Schedule:
    return build_schedule(kind, num_ranks, num_microbatches, chunks)


def run_each(
    axes: dict[str, int], cases: list[tuple[str, int, int]]
) -> list[tuple[float, float, int]]:
    """Return of each case the loss, the worst difference of a gradient, and how many there are."""
    found: list[tuple[float, float, int]] = []
    of_one: dict[int, tuple[float, dict[str, Tensor]]] = {}
    comm = Ranks(axes)
    for kind, chunks, num_microbatches in cases:
        num_rows = comm.size("data") * (2 * num_microbatches + 1)
        (batch,) = decoder_batches(SHAPE, 1, num_rows, 17, comm.size("data"), 5)
        microbatches = split(batch, comm.coord("data"), comm.size("data"), num_microbatches)
        every = [
            each
            for rank in range(comm.size("data"))
            for each in split(batch, rank, comm.size("data"), num_microbatches)
        ]
        num_valid = sum(int(NextToken().num_valid(each)) for each in every)
        if num_microbatches not in of_one:
            of_one[num_microbatches] = gradients(decoder(), Accumulate(), every, num_valid)
        loss_of_one, expected = of_one[num_microbatches]
        model = decoder()
        schedule = build_schedule(kind, comm.size("pp"), 1, chunks)
        cut = partition([1.0] * (SHAPE.num_layers + 2), schedule.num_stages)
        stages = DecoderStages(model, cut, schedule.stages_of(comm.coord("pp")))
        reducer = data.apply(model, comm) if comm.size("dp") > 1 else None
        p = comm.size("pp")
        run = Pipeline(
            stages,
            comm,
            lambda m, kind=kind, p=p, chunks=chunks: build_schedule(kind, p, m, chunks),
            reducer,
        )
        loss, ours = gradients(model, run, microbatches, num_valid)
        worst = max(float((ours[name] - expected[name]).abs().max()) for name in ours)
        names = {name for name, _ in model.named_parameters()}
        assert set(ours) == names
        total = float(comm.all_reduce(torch.tensor(loss, dtype=torch.float64), "data"))
        is_last = schedule.num_stages - 1 in schedule.stages_of(comm.coord("pp"))
        assert total == pytest.approx(loss_of_one if is_last else 0.0, rel=1e-14)
        found.append((loss, worst, len(ours)))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "count", "kinds"),
    [(2, 7, KINDS[2:7:2]), *(by_hand(n, count, KINDS) for n in (2, 4) for count in (4, 7))],
    ids=lambda value: str(value) if isinstance(value, int) else str(len(value)),
)
def test_gradients_are_those_of_one_process(
    num_ranks: int, count: int, kinds: list[tuple[str, int]]
) -> None:
    cases = [(*kind, count) for kind in kinds]
    ranks = run_ranks(run_each, num_ranks, {"pp": num_ranks}, cases, threads=1)
    num_gradients = len(list(Decoder(SHAPE).named_parameters()))
    for case, *of_ranks in zip(cases, *ranks, strict=True):
        (loss,) = {loss for loss, _, _ in of_ranks if loss}
        assert loss > 0, case
        assert max(worst for _, worst, _ in of_ranks) <= 1e-12, case
        assert sum(count for _, _, count in of_ranks) == num_gradients, case


@pytest.mark.parametrize("kinds", [OF_ONE_CHUNK[2:3], by_hand(OF_ONE_CHUNK)], ids=len)
def test_beside_data_parallelism(kinds: list[tuple[str, int]]) -> None:
    cases = [(*kind, 3) for kind in kinds]
    for of_rank in run_ranks(run_each, 4, {"pp": 2, "dp": 2}, cases, threads=1):
        assert max(worst for _, worst, _ in of_rank) <= 1e-12


def most_held(num_microbatches: int) -> int:
    """Return the most messages that this rank holds because they may not have been received."""
    held: list[int] = []
    right = runtime._Step.send

    def counted(self: Any, *args: Any) -> None:
        right(self, *args)
        held.append(sum(map(len, self.sending.values())))

    runtime._Step.send = counted
    run_each({"pp": 2}, [("1f1b", 1, num_microbatches)])
    return max(held)


def test_what_was_sent_is_let_go_when_it_was_received() -> None:
    """Not at the end of the step: a message holds the storage of an activation."""
    assert max(run_ranks(most_held, 2, 12, threads=1)) <= 4
