"""A job is verified by the loop that trains it, and faults planted in that loop are named."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
from torch import Tensor

import phalanx
from forked_torchrun import run_two
from phalanx.checkpoint import state
from phalanx.launch.local import run_ranks
from phalanx.parallel import batch_norm, dropout
from phalanx.script.session import ModuleSession
from phalanx.train import loop, step
from phalanx.verify.verdict import Verdict

sys.path.append(str(Path(__file__).parents[1] / "verify"))

from mutants import Patch, planted
from test_module_mutants import _as_in_training, _of_step_0


def dropping() -> phalanx.Trainer:
    return dataclasses.replace(jobs.with_dropout(), validation=jobs.Numbers())


def normed() -> phalanx.Trainer:
    return dataclasses.replace(jobs.with_batch_norm(), validation=jobs.Numbers(), batch_size=10)


def _masks_of_the_first_rows(right: Any) -> Any:
    def wrong(self: ModuleSession) -> Any:
        place = right(self)
        return place._replace(rows=self.microbatches.rows()[0][: len(place.rows)])

    return wrong


def _stays_in_eval(right: Any) -> Any:
    def wrong(session: ModuleSession) -> Any:
        found = right(session)
        session.step.model.eval()
        return found

    return wrong


def _without_buffers(right: Any) -> Any:
    def wrong(model: Any) -> dict[str, Tensor]:
        names = dict(model.named_parameters())
        return {name: tensor for name, tensor in right(model).items() if name in names}

    return wrong


def _schedule_from_the_start(right: Any) -> Any:
    def wrong(self: ModuleSession) -> Any:
        assert self.scheduler is not None
        self.scheduler.last_epoch = 0
        return right(self)

    return wrong


def _never_clipped(right: Any) -> Any:
    return lambda gradients, norm, limit: None


MUTANTS: dict[str, tuple[Any, list[Patch], str | None, str]] = {
    "masks of the first microbatch": (
        dropping, [(ModuleSession, "_place", _masks_of_the_first_rows)], "blocks.0.2",
        "its output differs",
    ),
    "an evaluation that leaves the model in eval mode": (
        dropping, [(loop, "evaluate", _stays_in_eval)], "", "leaves the model in eval mode",
    ),
    "the same masks in each step": (
        dropping, [(dropout, "row_keys", _of_step_0)], "blocks.0.2", "its output differs",
    ),
    "statistics of the batch in eval mode": (
        normed, [(batch_norm, "_forward", _as_in_training)], "1", "its output differs",
    ),
    "buffers that are not saved": (
        normed, [(state, "weights_of", _without_buffers)], "1", "resumed from dp2 differs",
    ),
    "a schedule that begins anew": (
        jobs.job, [(ModuleSession, "open_stream", _schedule_from_the_start)], None, "learning rate",
    ),
    "a gradient that is never clipped": (
        jobs.job, [(step, "scale_to", _never_clipped)], "0", "so the optimizer's update is wrong",
    ),
}  # fmt: skip

DEFAULT = {"masks of the first microbatch", "buffers that are not saved"}


def verdicts_on_ranks(names: list[str]) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    for name in names:
        make, patches, _, _ = MUTANTS[name]
        with planted(*patches):
            found[name] = make().verify("dp2", steps=4)
    # fsdp, under which other jobs resume, refuses sparse gradients
    found["sparse"] = jobs.of_table(sparse=True).verify("dp2", steps=3)
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(sorted(DEFAULT), id="default"),
        pytest.param(sorted(set(MUTANTS) - DEFAULT), id="others", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found_and_named(names: list[str], subtests: pytest.Subtests) -> None:
    found = run_ranks(verdicts_on_ranks, 2, names, threads=1)[0]
    with subtests.test("sparse gradients"):
        verdict = found.pop("sparse")
        assert verdict.is_equal, str(verdict)
        assert {row.step for row in verdict.differences} == {0, 1, 2}
    for name, verdict in found.items():
        with subtests.test(name):
            _, _, module, words = MUTANTS[name]
            assert not verdict.is_equal
            assert verdict.place is not None
            assert verdict.place.module == module, str(verdict)
            assert words in str(verdict)


@pytest.mark.slow
def test_ranks_that_torchrun_started_say_what_differs() -> None:
    script = f"{Path(__file__).parent}/jobs.py:with_local_norm"
    done = run_two("-m", "phalanx", "verify", "dp2", "--script", script, "--steps", "1")
    assert done.returncode == 1, done.stderr
    assert "dp2 differs from one process, first at step 0, " in done.stdout
    assert "takes mean and variance over the rows" in " ".join(done.stdout.split())
