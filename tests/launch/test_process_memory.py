"""Full collections of garbage: rare while modules are imported, as usual where ranks compute."""

from __future__ import annotations

import gc
import multiprocessing
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.launch import process_memory
from phalanx.launch.local import run_ranks

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


@pytest.mark.slow
def test_ranks_collect_as_usual_but_for_the_modules_that_they_begin_with(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    run = subprocess.run(
        [sys.executable, tmp_path / "job.py"], capture_output=True, text=True, check=True
    )
    for line in run.stdout.splitlines():
        *thresholds, num_frozen, num_full = map(int, line.split())
        assert tuple(thresholds) == process_memory._USUAL
        assert num_frozen > 100_000
        assert num_full <= 2, "full collections while the server imported"


def test_a_verb_starts_with_rare_collections() -> None:
    code = "import gc, sys; from phalanx.__main__ import main; main(); print(gc.get_threshold())"
    run = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == str(process_memory._IN_START_UP)
    assert process_memory._IN_START_UP[2] > 100


def test_thresholds_of_a_script_stay() -> None:
    usual = gc.get_threshold()
    try:
        process_memory.collect_rarely()
        assert gc.get_threshold() == process_memory._IN_START_UP
        process_memory.collect_as_usual()
        assert gc.get_threshold() == usual
        gc.set_threshold(5000, 20, 30)
        process_memory.collect_as_usual()
        assert gc.get_threshold() == (5000, 20, 30)
    finally:
        gc.set_threshold(*usual)


def faults() -> int:
    """Count the page faults of taking and freeing a block that fits where others have been.

    Return the least of several times, each for a smaller block: something small may have been put
    where they were.
    """
    counts = []
    for mebibytes in range(64, 34, -3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(mebibytes * 2**20 // 4)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts[1:])


@pytest.mark.fresh_ranks
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_rank_keeps_what_it_has_freed() -> None:
    assert run_ranks(faults, 1)[0] < 100
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(faults) > 100  # in a process that has not asked for it
