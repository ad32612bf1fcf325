"""Full collections of garbage: rare while modules are imported, as usual where ranks compute."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from phalanx.launch import garbage
from phalanx.launch.local import run_ranks


def collector() -> tuple[tuple[int, ...], int]:
    """Return the thresholds of this process, and how many objects no collection visits."""
    return gc.get_threshold(), gc.get_freeze_count()


@pytest.mark.fresh_ranks
def test_ranks_collect_as_usual_but_for_the_modules_that_they_begin_with() -> None:
    for thresholds, num_frozen in run_ranks(collector, 2):
        assert thresholds == garbage._USUAL
        assert num_frozen > 100_000


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
