"""The trainer takes the steps of plain PyTorch under any strategy, and keeps what it measures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from loops import Numbers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.checkpoint import manifest
from phalanx.cli.main import main
from phalanx.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    RankFailed,
    ScriptError,
)
from phalanx.launch.local import run_ranks
from phalanx.measure.spans import CounterSample, read_spans, span_files
from phalanx.script.session import train_module, words_of_few
from phalanx.script.trainer import trainer_of
from phalanx.strategy import Strategy

LIMIT = 1e-10


def plain_losses(trainer: phalanx.Trainer) -> tuple[list[float], float]:
    """Return the loss of each step of plain PyTorch, and the mean loss of the data afterwards."""
    torch.manual_seed(trainer.seed)
    model = jobs.perceptron_of_doubles()
    optimizer = jobs.adagrad(model.parameters())
    scheduler = jobs.halving(optimizer)
    losses: list[float] = []
    loader = DataLoader(Numbers(), trainer.batch_size, shuffle=True, drop_last=trainer.drop_last)
    for _ in range(trainer.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
    data = Numbers()
    return losses, float(cross_entropy(model(data.x), data.y).detach())


def check(fitted: Any, first: int, trainer: phalanx.Trainer) -> None:
    losses, last = plain_losses(trainer)
    assert fitted.steps_done == len(losses)
    assert fitted.losses == pytest.approx(losses[first:], rel=LIMIT)
    assert fitted.evaluations[-1].loss == pytest.approx(last, rel=LIMIT)


@pytest.mark.parametrize(
    "strategy", ["dp2", "pp2:gpipe", *map(by_hand, ("dp1", "fsdp2:zero2", "pp2,dp2"))]
)
def test_the_steps_are_those_of_plain_pytorch(tmp_path: Path, strategy: str) -> None:
    trainer = jobs.of_few_rows()
    fitted = trainer.train(strategy, phalanx.Options(out=tmp_path, threads=1))
    check(fitted, 0, trainer)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["tokens"] for record in steps] == [9, 9, 9, 9, 1] * 2
    assert all(record["unit"] == "samples" for record in steps)
    assert all(0 < record["mfu"] <= 1 for record in steps if record["mfu"] is not None)
    assert bool(fitted.sent) == (strategy != "dp1")
    assert fitted.memory is not None
    assert list((tmp_path / "tensorboard").iterdir())


def test_names_in_a_batch_stay_with_their_rows(tmp_path: Path) -> None:
    trainer = jobs.named()
    check(trainer.train("dp2", phalanx.Options(out=tmp_path, threads=1)), 0, trainer)


def test_a_sparse_gradient_is_clipped_as_a_dense_one_is(tmp_path: Path) -> None:
    found = [
        jobs.of_table(sparse=sparse).train(strategy, phalanx.Options(out=out, threads=1)).losses
        for sparse, strategy, out in ((False, "dp1", tmp_path / "a"), (True, "dp2", tmp_path / "b"))
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    ("steps", "before", "after"), [by_hand(3, "pp2", "fsdp2"), (5, "dp1", "dp1")]
)
def test_a_run_goes_on_under_another_strategy(
    tmp_path: Path, steps: int, before: str, after: str
) -> None:
    """From within a pass over the data, and from the end of one."""
    trainer = jobs.job()
    some = dataclasses.replace(trainer, steps=steps)
    profile = "wait=0,warmup=0,active=1,profile_memory=true"
    options = phalanx.Options(out=tmp_path, threads=1, profile=profile)
    assert some.train(before, options).steps_done == steps
    more = dataclasses.replace(options, resume=True, debug_comm=True)
    fitted = trainer.train(after, more)
    check(fitted, steps, trainer)
    assert fitted.run.startswith(f"Sequential, {after} on cpu, global batch ")
    profiled = [read_spans(file) for file in span_files(tmp_path)]
    assert [step.step for step in profiled] == [
        number
        for number, strategy in ((1, before), (steps + 1, after))
        for _ in range(Strategy.parse(strategy).num_ranks)
    ]
    counters = [{s.counter for s in p.spans if isinstance(s, CounterSample)} for p in profiled]
    assert all("memory" in each for each in counters[: len(counters) // 2])
    assert all("memory" not in each for each in counters[len(counters) // 2 :])  # by debug_comm
    with pytest.raises(ConfigError, match="profile: 'wit=1'"):
        phalanx.Options(out=tmp_path, profile="wit=1")


def test_a_pass_may_leave_out_its_last_batch(tmp_path: Path) -> None:
    trainer = dataclasses.replace(jobs.of_few_rows(), drop_last=True, epochs=1)
    fitted = trainer.train("dp1", phalanx.Options(out=tmp_path, threads=1))
    assert fitted.steps_done == 4
    check(fitted, 0, trainer)


def test_a_run_resumes_from_the_checkpoint_of_most_steps(tmp_path: Path) -> None:
    """By number: as text, 9 comes after 10."""
    trainer = dataclasses.replace(jobs.job(), validation=None, steps=10)
    options = phalanx.Options(out=tmp_path, threads=1, save="every=9")
    trainer.train("dp1", options)
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2
    longer = dataclasses.replace(trainer, steps=11)
    assert len(longer.train("dp1", dataclasses.replace(options, resume=True)).losses) == 1


def test_a_stream_that_ends_too_early_is_told(tmp_path: Path) -> None:
    trainer = dataclasses.replace(
        jobs.job(), data=jobs.OnlyOnce(), shuffle=False, validation=None, steps=7
    )
    options = phalanx.Options(out=tmp_path, threads=1)
    with pytest.raises(DataError, match="the data ended after step 5 of 7"):
        trainer.train("dp1", options)


def test_weights_that_are_nan_are_kept_by_an_evaluation() -> None:
    trainer = dataclasses.replace(jobs.job(), build=jobs.with_nan, scheduler=None)
    verdict = trainer.verify("dp2", steps=1)
    assert verdict.is_equal, str(verdict)


@pytest.mark.parametrize("strategy", [by_hand("dp2"), by_hand("fsdp2"), "pp2"])
def test_the_same_job_is_proven(strategy: str) -> None:
    verdict = jobs.job().verify(strategy)
    assert verdict.is_equal, str(verdict)


@pytest.mark.parametrize(
    "strategy", [by_hand("dp2"), by_hand("fsdp3"), "pp2", by_hand("pp2:zbv,dp2")]
)
def test_masks_of_dropout_are_proven_to_belong_to_the_sample(strategy: str) -> None:
    verdict = jobs.with_dropout().verify(strategy)
    assert verdict.is_equal, str(verdict)


def test_a_pipeline_trains_with_the_masks_of_one_process(tmp_path: Path) -> None:
    """And no forward, of which a stage runs a part, leaves anything behind."""
    trainer = dataclasses.replace(jobs.with_dropout(), objective=jobs.Shallow())
    one, two = (
        trainer.train(strategy, phalanx.Options(out=tmp_path / strategy, threads=1))
        for strategy in ("dp1", "pp2")
    )
    assert two.losses == pytest.approx(one.losses, rel=LIMIT)


def test_a_pipeline_of_too_few_microbatches_is_told() -> None:
    (line,) = words_of_few(Strategy.parse("pp2,dp2"), 1)
    assert line.startswith("accumulation is 1, so that ranks of pp2 without a microbatch wait")
    assert "accumulation=4" in line
    assert words_of_few(Strategy.parse("pp2"), 2) == words_of_few(Strategy.parse("dp2"), 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pp2", "pp2:interleaved/2", "pp2:zbv", "pp2,dp2"])
def test_a_pipeline_takes_any_number_of_microbatches(tmp_path: Path, strategy: str) -> None:
    trainer = dataclasses.replace(
        jobs.with_dropout(), objective=jobs.Shallow(), accumulation=4, steps=500
    )
    fitted = trainer.train(strategy, phalanx.Options(out=tmp_path, threads=1))
    assert fitted.steps_done == 500


@pytest.mark.parametrize("strategy", ["dp2", by_hand("fsdp3")])
def test_batch_norm_over_all_ranks_is_proven(strategy: str) -> None:
    verdict = jobs.with_batch_norm().verify(strategy)
    assert verdict.is_equal, str(verdict)


@pytest.mark.parametrize("strategy", ["dp2", by_hand("pp2,dp2")])
def test_microbatches_of_all_ranks_are_those_of_one_process(strategy: str, tmp_path: Path) -> None:
    """BatchNorm takes the rows of a microbatch together; under pp one stage alone has it."""
    trainer = dataclasses.replace(jobs.with_batch_norm(), accumulation=3, batch_size=14)
    one, several = (
        trainer.train(text, phalanx.Options(out=tmp_path / text, threads=1)).losses
        for text in ("dp1", strategy)
    )
    assert several == pytest.approx(one, rel=LIMIT)


@pytest.mark.parametrize("strategy", ["dp2", by_hand("fsdp2"), by_hand("pp2")])
def test_a_mean_times_its_count_is_a_sum_for_ranks_without_rows_too(
    tmp_path: Path, strategy: str
) -> None:
    """And what counts the FLOPs leaves an objective's state alone."""
    trainer = dataclasses.replace(jobs.job(), batch_size=9, epochs=1, accumulation=1)
    fitted, expected = (
        dataclasses.replace(trainer, objective=objective).train(
            how, phalanx.Options(out=tmp_path / how, threads=1)
        )
        for objective, how in ((jobs.CountedMeans(), strategy), (jobs.Classes(), "dp1"))
    )
    first, last = (evaluation.loss for evaluation in expected.evaluations)
    # An evaluation of five batches comes first.
    halved = first - fitted.evaluations[0].loss
    assert 0 < halved < first / 2
    assert fitted.losses == pytest.approx(expected.losses, rel=LIMIT)
    assert fitted.evaluations[1].loss == pytest.approx(last, rel=LIMIT)


def test_a_mean_is_refused(tmp_path: Path) -> None:
    trainer = dataclasses.replace(jobs.job(), objective=jobs.Means())
    with pytest.raises(ScriptError, match="loss_sum: the loss is a mean"):
        trainer.train("dp2", phalanx.Options(out=tmp_path, threads=1))


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(tmp_path: Path) -> None:
    """Ranks look for a signal about once a second."""
    options = phalanx.Options(out=str(tmp_path), threads=1)  # pyright: ignore[reportArgumentType]
    plain = dataclasses.replace(jobs.job(), validation=None, epochs=10_000)
    stopping = dataclasses.replace(plain, data=jobs.Stopping())
    with pytest.raises(Interrupted, match=r"by SIGTERM; step \d+ of 50000 is done; ") as stopped:
        stopping.train("dp2", options)
    (step,) = map(int, re.findall(r"step (\d+) of", str(stopped.value)))
    assert str(stopped.value).endswith(
        f"; resume by: phalanx.Options(out={str(tmp_path)!r}, resume=True)"
    )
    some = dataclasses.replace(plain, steps=step + 3)
    fitted = some.train("fsdp2", dataclasses.replace(options, resume=True))
    whole = some.train("dp1", dataclasses.replace(options, out=tmp_path / "whole"))
    assert fitted.losses == pytest.approx(whole.losses[step:], rel=LIMIT)
    again = some.train("dp1", dataclasses.replace(options, resume=True))
    assert (again.losses, again.checkpoint) == ([], fitted.checkpoint)


def test_a_signal_in_the_last_step_leaves_a_run_that_is_done(tmp_path: Path) -> None:
    trainer = dataclasses.replace(
        jobs.job(), data=jobs.Stopping(), shuffle=False, validation=None, steps=2
    )
    fitted = trainer.train("dp1", phalanx.Options(out=tmp_path, threads=1))
    assert fitted.steps_done == 2


def fit_in_own_folder(folder: Path) -> str:
    """Train as ranks of torchrun do whose clocks give the run's folder different names."""
    trainer = dataclasses.replace(jobs.job(), validation=None, steps=1)
    options = phalanx.Options(out=folder / f"of-rank-{dist.get_rank()}", threads=1)
    return train_module(trainer, Strategy.parse("dp2"), options).checkpoint


def test_the_first_rank_names_the_folder(tmp_path: Path) -> None:
    saved = run_ranks(fit_in_own_folder, 2, tmp_path, threads=1)
    assert saved == [str(tmp_path / "of-rank-0" / "checkpoints" / "step-00000001")] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["of-rank-0"]


def fit_otherwise(folder: Path) -> None:
    """Train as a rank does to which torchrun on another host has given other settings."""
    rank = dist.get_rank()
    trainer = dataclasses.replace(jobs.job(), validation=None, steps=1 + rank)
    train_module(trainer, Strategy.parse("dp2"), phalanx.Options(out=folder, save=f"every={rank}"))


def test_ranks_of_other_settings_are_named(tmp_path: Path) -> None:
    differ = (
        r"differ in steps \(1 on rank 0, 2 on rank 1\); "
        r"save \(every=0 on rank 0, every=1 on rank 1\)"
    )
    with pytest.raises(ConfigError, match=differ):
        run_ranks(fit_otherwise, 2, tmp_path, threads=1)
    assert list(tmp_path.iterdir()) == []


def test_batch_norm_over_own_rows_says_why_it_differs() -> None:
    trainer = dataclasses.replace(jobs.with_batch_norm(), batch_norm="local")
    verdict = trainer.verify("dp2")
    assert not verdict.is_equal
    assert any("takes mean and variance over the rows" in cause for cause in verdict.causes)


def test_the_words_of_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = f"{Path(__file__).parent}/jobs.py:job"
    words = ["train", "--script", script, "--strategy", "pp2", "--out", str(tmp_path)]
    assert main([*words, "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "validation  loss" in printed
    assert f"checkpoint  {tmp_path}/checkpoints/step-00000010" in printed
    words = ["train", "--script", script, "--strategy", "dp2", "--resume", str(tmp_path)]
    assert main([*words, "--threads", "1"]) == 0
    capsys.readouterr()
    said = " ".join((tmp_path / "logs" / "rank-0.log").read_text().split())
    assert "step-00000010, with another strategy: pp2 -> dp2" in said
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "step-00000010 is of a training script" in capsys.readouterr().err


def test_a_job_that_is_killed_says_what_stands_and_the_command_that_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"phalanx train --script {Path(__file__).parent}/jobs.py:dying"
    words = f"--strategy dp2 --save every=1 --threads 1 --out {tmp_path}"
    assert main([*command.split()[1:], *words.split()]) == 1
    said = capsys.readouterr().err.splitlines()
    # The last was being written.
    last = manifest.find(tmp_path)
    assert re.fullmatch("step-0000000[123]", last.name)
    assert said[-1] == f"last checkpoint: {last}; resume by: {command} --resume {tmp_path}"


@pytest.mark.parametrize(("script", "words"), [
    ("jobs.py", "expected FILE.py:FUNCTION"), ("nothing.py:job", "nothing.py does not exist"),
    (f"{Path(__file__).parent}/jobs.py:nothing", "has no function 'nothing'"),
    (f"{Path(__file__).parent}/jobs.py:no_job", "returns a int; expected a phalanx.Trainer"),
])  # fmt: skip
def test_what_is_no_job_is_refused(script: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer_of(script)


def test_the_shell_verifies_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    script = f"{Path(__file__).parent}/jobs.py:job"
    assert main(["verify", "dp2", "--script", script, "--steps", "1", "--json"]) == 0
    *table, document = capsys.readouterr().out.splitlines()
    assert "Largest errors against plain PyTorch" in table[0]
    assert json.loads(document)["verdicts"][0]["largest_errors"]["validation loss"] < LIMIT


class Crashing(jobs.Classes):
    def loss_sum(self, model: Any, microbatch: Any, step: int) -> Any:
        raise RuntimeError("out of luck")


def test_a_crash_in_the_first_step_leaves_the_logs_of_all_ranks(tmp_path: Path) -> None:
    job = dataclasses.replace(jobs.job(), objective=Crashing(), validation=None)
    with pytest.raises(RankFailed, match="out of luck"):
        job.train("dp2", phalanx.Options(out=tmp_path / "new", threads=1))
    assert {file.name for file in (tmp_path / "new/logs").iterdir()} == {"rank-0.log", "rank-1.log"}


def test_a_folder_with_another_run_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path, threads=1)
    some = dataclasses.replace(jobs.job(), steps=1)
    some.train("dp1", options)
    with pytest.raises(CheckpointError, match="holds checkpoints of another run, the last after"):
        some.train("dp1", options)
