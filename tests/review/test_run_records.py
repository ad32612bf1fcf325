"""Records of runs that were killed, resumed or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.review.run_records import newest_run, read_run
from recorded_run import config, ranks, step, summary, write_run


def test_a_resumed_run_replaces_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    evaluation = {"kind": "evaluation", "step": 3, "loss": 9.0}
    first = [config("dp2"), step(1), step(2, loss=7.0), step(3), ranks(1, 3), evaluation]
    resumed = [config("fsdp2"), step(2, loss=1.0, bubble_s=None), step(3, extra_s=2.0)]
    run = read_run(write_run(tmp_path / "run", *first, summary(), *resumed))
    assert list(run.columns["step"]) == [1, 2, 3]
    assert list(run.columns["loss"])[:2] == [5.9, 1.0]
    assert list(run.columns["extra_s"])[2] == 2.0 and run.columns["extra_s"][0] != 0
    assert run.begin == 1 and run.num_processes == 2
    assert not run.summary and not run.ranks and not run.evaluations
    assert run.config["strategy"] == "fsdp2"


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", config("dp2"), step(1))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"kind": "step"}\n{"step": 2}\n')
        file.write(json.dumps(step(2)).encode() + b"\n" + json.dumps(step(3)).encode()[:40])
    run = read_run(folder)
    assert list(run.columns["step"]) == [1, 2] and run.num_damaged == 5


def test_the_newest_run(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="there is no run in"):
        newest_run(tmp_path)
    write_run(tmp_path / "one")
    assert newest_run(tmp_path) == tmp_path / "one"
