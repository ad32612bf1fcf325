"""A loop of one's own computes on any ranks what it computes in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from loops import Case, Numbers, Stream, Twice, as_rows, normed, of_groups

from marks import by_hand
from phalanx.launch.local import run_ranks

LIMIT = 1e-10

CASES: dict[str, Case] = {
    "adam": Case(),
    "sgd": Case(optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1)),
    "momentum": Case(optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, nesterov=True)),
    "adagrad": Case(optimizer=lambda m: torch.optim.Adagrad(m.parameters(), 0.1)),
    "rmsprop": Case(optimizer=lambda m: torch.optim.RMSprop(m.parameters(), 0.01, centered=True)),
    "nadam": Case(optimizer=lambda m: torch.optim.NAdam(m.parameters(), 0.01)),
    "fused": Case(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True)),
    "foreach": Case(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True)),
    "groups": Case(optimizer=of_groups, schedules=True),
    "clipped": Case(max_norm=0.1),
    "accumulated": Case(accumulation=3, max_norm=0.2),
    "one row left": Case(batch_size=9, accumulation=2),
    "dicts": Case(dataset=lambda: Numbers("dict")),
    "dataclasses": Case(dataset=lambda: Numbers("dict"), collate=as_rows),
    "stream": Case(dataset=Stream, shuffle=False),
    "twice": Case(build=Twice),
    "batch norm": Case(build=normed, options={"batch_norm": "global"}),
}


SOME = ("groups", "accumulated", "one row left", "twice", "batch norm")
"""The cases where the number of ranks matters."""


def results(strategies: list[str], names: Sequence[str]) -> dict[tuple[str, str], Any]:
    """Run cases under every strategy, on the ranks of one job."""
    return {
        (strategy, name): loops.distributed(CASES[name], strategy)
        for strategy in strategies
        for name in names
    }


@pytest.mark.parametrize(
    ("num_ranks", "strategies", "names"),
    [
        (1, ["dp1"], tuple(CASES)),
        (2, ["dp2", "fsdp2:zero2"], tuple(CASES)),
        (2, ["dp2:naive", "fsdp2", "fsdp2:zero1"], SOME),
        (3, ["dp3", "fsdp3"], SOME),
        (4, ["dp2,fsdp2"], SOME),
        by_hand(2, ["dp2:naive", "fsdp2", "fsdp2:zero1"], tuple(CASES)),
        by_hand(3, ["dp3", "fsdp3"], tuple(CASES)),
        by_hand(4, ["dp2,fsdp2"], tuple(CASES)),
    ],
)
def test_every_rank_computes_what_one_process_does(
    num_ranks: int, strategies: list[str], names: Sequence[str]
) -> None:
    found = run_ranks(results, num_ranks, strategies, names, threads=1)
    for name in names:
        expected = loops.plain(CASES[name])
        for strategy in strategies:
            for rank in found:
                error = loops.largest_error(rank[strategy, name], expected)
                assert error < LIMIT, (strategy, name, error)


def losses_before(folder: Path, strategy: str, num_steps: int) -> list[float]:
    loop = loops.Distributed(CASES["groups"], strategy)
    loop.train(num_steps)
    loop.run.save(folder)
    return loop.losses


def losses_after(folder: Path, strategy: str) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    loop = loops.Distributed(CASES["groups"], strategy)
    assert loop.run.resume(folder)
    steps_done = loop.run.steps_done
    loop.train()
    return steps_done, loop.losses, loop.weights()


@pytest.mark.parametrize("num_steps", [3, 5, 7])
def test_a_loop_that_is_stopped_goes_on_under_another_strategy(
    tmp_path: Path, num_steps: int
) -> None:
    """A pass has five steps: it stops within the first, at its end, and within the second."""
    run_ranks(losses_before, 2, tmp_path, "fsdp2", num_steps, threads=1)
    losses, weights = loops.plain(CASES["groups"])
    for num_ranks, strategy in ((2, "dp2"), (3, "fsdp3:zero1"), (1, "dp1")):
        found = run_ranks(losses_after, num_ranks, tmp_path, strategy, threads=1)
        for steps_done, after, after_weights in found:
            assert steps_done == num_steps
            assert (
                loops.largest_error((after, after_weights), (losses[num_steps:], weights)) < LIMIT
            )


def folders_of_runs_begun_anew(folder: Path) -> list[str]:
    names: list[str] = []
    for _ in range(2):
        loop = loops.Distributed(CASES["adam"], "dp2")
        loop.train(1)
        names += [loop.run.save(folder).parents[1].name for _ in range(2)]
    return names


def test_a_run_begun_anew_leaves_the_checkpoints_of_another_alone(tmp_path: Path) -> None:
    for names in run_ranks(folders_of_runs_begun_anew, 2, tmp_path / "run", threads=1):
        assert names == ["run", "run", "run-2", "run-2"]
