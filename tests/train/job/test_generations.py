"""A run that continues by itself: `--resume auto`, and later generations of `phalanx launch`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from marks import by_hand
from phalanx.checkpoint import manifest
from phalanx.config import BatchConfig, TrainConfig
from phalanx.config.load import load_config
from phalanx.errors import ConfigError
from phalanx.launch import launched
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.launched import JobReport, Launched, read_report
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy, shrunk
from phalanx.train import pace, run
from phalanx.train.callback import Callback, Callbacks
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.job.resume import continuation, continued
from phalanx.train.job.run_folder import claim
from phalanx.train.loop import Stopped, train
from phalanx.train.text import TextSession
from small_run import SHAPE, losses, small_run

STEPS = 8


class Stop(Callback):
    """Asks to stop after a step, as the launcher does for a host that joins."""

    def __init__(self, last: int) -> None:
        self.last = last

    def step(self, steps_done: int, result: Any) -> None:
        if steps_done == self.last:
            PULSE.stop_signal = signal.SIGTERM


class Recorded(TextSession):
    """Keeps the positions of this rank's samples in the stream."""

    def __init__(self, *args: Any) -> None:
        self.rows: list[list[int]] = []
        super().__init__(*args)

    def next_microbatches(self) -> Sequence[Any]:
        microbatches = super().next_microbatches()
        self.rows.append([row for batch in microbatches for row in batch.rows_B.tolist()])
        return microbatches


def one_generation(job: Job, text: str, last: int) -> tuple[list[list[int]], JobReport]:
    """Train as a rank of a generation that is asked to stop after step `last`."""
    os.environ[launched.VARIABLE] = text
    pace.COMPARE_S = 0.0  # in each step
    session = Recorded(job, Callbacks({"stop": Stop(last)}))
    assert isinstance(train(session), Stopped) == (session.step.steps_done < STEPS)
    report = read_report(Launched(**json.loads(text)).folder)
    assert report is not None
    return session.rows, report


@pytest.mark.parametrize(
    ("first", "ranks"),
    [
        ("fsdp4", (4, 3, 2, 4)),
        *(by_hand(each, (4, 3, 2, 4)) for each in ("dp4", "dp2,fsdp2")),
        *(by_hand(f"{each},dp2", (4, 3, 4)) for each in ("pp2", "tp2", "cp2")),
    ],
)
def test_a_run_on_fewer_and_more_ranks_takes_the_samples_and_losses_of_an_undisturbed_one(
    first: str, ranks: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = BatchConfig(global_size=12, microbatch=3)
    shape = dataclasses.replace(SHAPE, num_kv_heads=2)  # for tp2
    plain = small_run(tmp_path, strategy="dp1", steps=STEPS, batch=batch, shape=shape)
    run.train(plain)
    command = dataclasses.replace(plain, strategy=first, out=str(tmp_path / "elastic"), nproc=4)
    state, rows, microbatches = Launched(folder=str(tmp_path)), list[list[int]](), list[int]()
    for number in range(len(ranks)):
        monkeypatch.setenv(launched.VARIABLE, state.text())
        job = claim(resolve(continued(command)))
        microbatches.append(job.batch.microbatch)
        last = 1 + 2 * number if number < len(ranks) - 1 else STEPS
        found = run_ranks(
            one_generation, job.strategy.num_ranks, job, state.text(), last, threads=1
        )
        for step in zip(*(each for each, _ in found), strict=True):
            taken = list(chain.from_iterable(step))
            assert len(taken) * job.strategy.data_ranks == 12 * job.strategy.num_ranks
            rows.append(sorted(set(taken)))
        report = found[0][1]
        assert report == JobReport(strategy=str(job.strategy), run=str(job.out), global_rows=12)
        following = ranks[min(number + 1, len(ranks) - 1)]
        state = dataclasses.replace(
            state,  # of generation 0, as no agent has states in memory
            strategy=str(shrunk(Strategy.parse(first), following, report.global_rows)),
            first=first,
            run=report.run,
        )
    assert microbatches[0] == microbatches[-1] == 3
    assert rows == [[*range(12 * step, 12 * step + 12)] for step in range(STEPS)]
    assert losses(job.out) == pytest.approx(losses(plain.out), rel=1e-10)


def test_auto_resumes_the_run_in_out_and_else_begins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--resume", "auto", "--out", str(tmp_path), "--init", "weights", "--seed", "3"]
    config = load_config(words, revise=continuation).config
    assert (config.resume, config.out, config.init) == (None, str(tmp_path), "weights")
    (tmp_path / "config.toml").write_text("steps = 7\n[batch]\nglobal_size = 12\nmicrobatch = 4")
    folder = manifest.folder_of(tmp_path, 2)
    folder.mkdir(parents=True)
    (folder / manifest.NAME).touch()
    config = load_config(words, revise=continuation).config
    assert (config.resume, config.out, config.init) == (str(tmp_path), None, None)
    assert (config.steps, config.seed) == (7, 3)
    with pytest.raises(ConfigError, match=r"resume is auto, .*give --out FOLDER"):
        continued(TrainConfig(resume="auto"))
    # Of a script with several runs, the launcher knows one.
    state = Launched(folder="", strategy="dp3", run=str(tmp_path))
    monkeypatch.setenv(launched.VARIABLE, state.text())
    config = continued(TrainConfig(strategy="dp4", nproc=4))
    assert (config.resume, config.out) == (str(tmp_path), None)
    assert (config.strategy, config.nproc) == ("dp3", None)
    assert config.batch == BatchConfig(global_size=12, microbatch=4)
    monkeypatch.setenv(launched.VARIABLE, dataclasses.replace(state, restarts=1).text())
    continued(TrainConfig())
    with pytest.raises(ConfigError, match=r"second run without a folder, .*; give out"):
        continued(TrainConfig(seed=4))
    other = continued(TrainConfig(out="other"))
    assert (other.resume, other.out) == (None, "other")
    folder.rename(folder.with_suffix(".partial"))
    other = continued(TrainConfig(resume="other", out=str(tmp_path), steps=9))
    assert (other.resume, other.out, other.steps) == ("other", str(tmp_path), 9)
