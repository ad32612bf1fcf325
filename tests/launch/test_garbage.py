"""Full collections of garbage: rare while modules are imported, as usual where ranks compute."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from phalanx.launch import garbage

JOB = """
import gc
from phalanx.launch.local import run_ranks

def collector():
    return gc.get_threshold(), gc.get_freeze_count(), gc.get_stats()[2]["collections"]

if __name__ == "__main__":
    for thresholds, num_frozen, num_full in run_ranks(collector, 2):
        print(*thresholds, num_frozen, num_full)
"""
"""A program of its own: the server of the tests' ranks freezes all that it has imported."""


def test_ranks_collect_as_usual_but_for_the_modules_that_they_begin_with(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    run = subprocess.run(
        [sys.executable, tmp_path / "job.py"], capture_output=True, text=True, check=True
    )
    for line in run.stdout.splitlines():
        *thresholds, num_frozen, num_full = map(int, line.split())
        assert tuple(thresholds) == garbage._USUAL
        assert num_frozen > 100_000
        assert num_full <= 2, "full collections while the server imported"


def test_a_verb_starts_with_rare_collections() -> None:
    code = "import gc, sys; from phalanx.__main__ import main; main(); print(gc.get_threshold())"
    run = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == str(garbage._IN_START_UP)
    assert garbage._IN_START_UP[2] > 100


def test_thresholds_of_a_script_stay() -> None:
    usual = gc.get_threshold()
    try:
        garbage.collect_rarely()
        assert gc.get_threshold() == garbage._IN_START_UP
        garbage.collect_as_usual()
        assert gc.get_threshold() == usual
        gc.set_threshold(5000, 20, 30)
        garbage.collect_as_usual()
        assert gc.get_threshold() == (5000, 20, 30)
    finally:
        gc.set_threshold(*usual)
