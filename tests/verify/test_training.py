"""The road of training against plain PyTorch without a break, and faults planted in it."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mutants import SLOW, Patch, planted

from marks import by_hand
from phalanx.checkpoint import state
from phalanx.comm.primitives import local_part
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.strategy import Strategy
from phalanx.train import session
from phalanx.train.job.resolve import Job, resolve
from phalanx.verify import training
from phalanx.verify.training import (
    compare_narrow,
    compare_parts,
    continued,
    narrowed,
    run_config,
    train_part,
)
from phalanx.verify.verdict import Verdict


def _first_rows_everywhere(right: Any) -> Any:
    """A rank's shard begins with the first rows of the whole."""
    return lambda shape, seed, shard, name, full, offset: right(
        shape, seed, shard, name, full, (0,) * len(offset)
    )


def _without_moments(right: Any) -> Any:
    def wrong(folder: Any, model: Any, optimizer: Any) -> None:
        right(folder, model, optimizer)
        optimizer.state.clear()

    return wrong


def _rounded(right: Any) -> Any:
    def wrong(folder: Any, model: Any, optimizer: Any) -> None:
        right(folder, model, optimizer)
        for parameter in model.parameters():
            local = local_part(parameter.detach())
            local.copy_(local.float())

    return wrong


def _rows_of_rank_0(right: Any) -> Any:
    return lambda mesh: (0, right(mesh)[1])


def _from_step_0(right: Any) -> Any:
    """A run that goes on begins its schedule and its masks anew."""

    def wrong(job: Job) -> Any:
        opened = right(job)
        opened.step.steps_done = 0
        return opened

    return wrong


def _position_by_steps(right: Any) -> Any:
    """The place in the data is taken for steps times the present global batch."""

    def wrong(job: Job, mesh: Any, consumed: int) -> Any:
        steps = 0 if job.start is None else job.start.about.steps_done
        return right(job, mesh, steps * job.batch.global_size)

    return wrong


def _stays_in_eval(right: Any) -> Any:
    return lambda opened: (right(opened), opened.model.eval())[0]


def _stays_in_training(right: Any) -> Any:
    return lambda self: self


def _narrow_masters(right: Any) -> Any:
    def wrong(name: str, device: str) -> Any:
        return dataclasses.replace(right(name, device), master=torch.bfloat16)

    return wrong


OF_ROAD: dict[str, tuple[list[Patch], str | None, str]] = {
    "first weights that begin anew on each rank": (
        [(session, "fill_initial", _first_rows_everywhere)],
        "embedding", "weight of embedding.weight",
    ),
    "moments that are not restored": (
        [(state, "load", _without_moments)], "embedding", "first moment of embedding.weight",
    ),
    "weights read as float32": (
        [(state, "load", _rounded)], "embedding", "weight of embedding.weight",
    ),
    "rank 1 with the rows of rank 0": (
        [(session, "data_coordinate", _rows_of_rank_0)], None, "its 4 rows are 0 to 6",
    ),
    "a schedule that begins anew": (
        [(training, "open_session", _from_step_0)], None, "the number of steps done is 0, not 2",
    ),
    "a position in the data by the present batch": (
        [(session, "_loader", _position_by_steps)], None, "the position in the data is 24",
    ),
    "evaluation that leaves the model in eval mode": (
        [(training, "evaluate", _stays_in_eval)], "", "evaluation leaves the model in eval mode",
    ),
    "evaluation with dropout": (
        [(Decoder, "eval", _stays_in_training)], None, "the validation loss is the first",
    ),
}  # fmt: skip

OF_NARROW: dict[str, tuple[list[Patch], str | None, str]] = {
    "masters in bfloat16": (
        [(session, "resolve", _narrow_masters)], "", "the weights are in torch.bfloat16",
    ),
}  # fmt: skip


def job_of(config: Any) -> Job:
    return broadcast_object(resolve(config) if dist.get_rank() == 0 else None)


def road_on_ranks(folder: str, is_slow: bool) -> dict[str, Verdict]:
    """Take the road once for each mutant, and once without a fault, in one job."""
    road = {name: mutant[0] for name, mutant in OF_ROAD.items() if (name in SLOW) == is_slow}
    config = run_config(Strategy.parse("fsdp2"), Path(folder))
    found: dict[str, Verdict] = {}
    for name, patches in {"": list[Patch](), **road}.items():
        out = Path(folder) / f"run {name}"
        with planted(*patches):
            first = job_of(dataclasses.replace(config, out=str(out / "first")))
            parts = [gather_objects(train_part(first))]
            second = job_of(continued(first.config, first.strategy, out))
            parts.append(gather_objects(train_part(second)))
        found[name] = compare_parts([first, second], parts)
    for name, patches in {" ": [], **{n: mutant[0] for n, mutant in OF_NARROW.items()}}.items():
        job = job_of(narrowed(config, Path(folder) / f"narrow {name}"))
        with planted(*patches):
            found[name] = compare_narrow(job, gather_objects(train_part(job)))
    return found


@functools.cache
def verdicts(is_slow: bool = False) -> dict[str, Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(road_on_ranks, 2, folder, is_slow)[0]


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        by_hand(name, *mutant[1:]) if name in SLOW else (name, *mutant[1:])
        for group in (OF_ROAD, OF_NARROW)
        for name, mutant in group.items()
    ],
)
def test_a_planted_fault_is_found_and_named(name: str, module: str | None, words: str) -> None:
    verdict = verdicts(name in SLOW)[name]
    assert not verdict.is_equal
    assert verdict.place is not None
    assert verdict.place.module == module, str(verdict)
    assert words in str(verdict)


@pytest.mark.parametrize("name", ["", " "], ids=["float64", "bfloat16"])
def test_the_road_without_a_fault_is_that_of_plain_pytorch(name: str) -> None:
    assert verdicts()[name].is_equal, str(verdicts()[name])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp2", "tp2", "fsdp2,tp2"])
def test_the_road_on_processes_of_its_own(text: str, tmp_path: Path) -> None:
    for verdict in training.verify_training(Strategy.parse(text), tmp_path):
        assert verdict.is_equal, str(verdict)
