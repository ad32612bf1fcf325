"""`auto` of a trainer is the first of the planner's own ranking, and a resumed run keeps it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jobs
import pytest

import phalanx
from phalanx.checkpoint.manifest import find_and_read
from phalanx.cli.main import main
from phalanx.config.schema import JobConfig
from phalanx.errors import ConfigError
from phalanx.planner.calibration import ASSUMED, as_cluster
from phalanx.planner.calibration_file import Calibration
from phalanx.planner.machine import Cluster
from phalanx.planner.search import search_module
from phalanx.planner.software import DEFAULT
from phalanx.script import automatic
from phalanx.script.counting import module_of, question_of

HERE = Calibration(kind="cpu", device_name="A CPU", num_here=2, compute=ASSUMED)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def this_machine(num: int | None, _: object) -> Cluster:
        return as_cluster("this", HERE, num)

    monkeypatch.setattr(automatic, "this_machine", this_machine)


def asked(**more: object) -> JobConfig:
    return dataclasses.replace(JobConfig(strategy="auto", nproc=2, device="cpu"), **more)


def test_a_trainer_takes_what_the_planner_ranks_first() -> None:
    job = jobs.job()
    strategy, why = automatic.chosen(job, "a job", asked())
    module = module_of(job, "a job")
    question = question_of(job, module, as_cluster("this", HERE, 2), DEFAULT)
    best, *_ = search_module(question, job.accumulation).candidates
    assert strategy == best.planned.strategy and strategy.num_ranks == 2
    assert why[0].startswith(f"auto: {strategy} with microbatch {best.planned.microbatch}")


def test_what_no_strategy_divides_is_said() -> None:
    job = dataclasses.replace(jobs.job(), batch_size=1)
    with pytest.raises(ConfigError, match="no strategy splits the batch of 1 rows"):
        automatic.chosen(job, "a job", asked())


def test_a_run_that_chose_resumes_under_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train --script {Path(__file__).parent}/jobs.py:job --strategy auto"
    assert main([*words.split(), "--nproc", "2", "--steps", "2", "--out", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    before = find_and_read(tmp_path).about.strategy
    assert f"phalanx {words} --resume {tmp_path}" in printed
    # Whatever the planner would choose now, the run keeps its own.
    monkeypatch.setattr(automatic, "search_module", None)
    resumed = dataclasses.replace(jobs.job(), steps=4)
    options = phalanx.Options(out=tmp_path, device="cpu", resume=True)
    assert resumed.train("auto", options).steps_done == 4
    found = find_and_read(tmp_path).about
    assert (found.strategy, found.steps_done) == (before, 4)
