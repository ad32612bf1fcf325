"""A rank of 4,096 starts and plans its saves within a bound, and its calls do not grow with them.

Bounds are in the processor's seconds: other work on the machine must not decide.
"""

from __future__ import annotations

import multiprocessing
import runpy
from pathlib import Path
from typing import Any

import pytest

MAIN = str(Path(__file__).parents[2] / "benchmarks/scale/main.py")
SCALE: dict[str, Any] = runpy.run_path(MAIN)
SPLITS: dict[str, str] = SCALE["SPLITS"]
NUM_RANKS = 4096
STATE_BYTES = 8.03e9 * 12


def call(name: str, *args: Any) -> Any:
    """Call a function of the benchmark, in a process that joins a job of its own."""
    return runpy.run_path(MAIN)[name](*args)


def in_a_process(name: str, *args: Any) -> Any:
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(call, (name, *args))


def expect_bounds(text: str) -> None:
    found = in_a_process("start", text, SPLITS[text], NUM_RANKS // 3, "llama3-8b")
    assert sum(found["cpu_s"].values()) < SCALE["BOUND_S"], found["cpu_s"]
    assert found["calls_before_the_first_step"] == 0
    assert 0 < found["written_bytes"] < 1.5 * STATE_BYTES / NUM_RANKS
    assert 0 < found["files_read"] < NUM_RANKS / 4


@pytest.mark.slow
def test_a_rank_of_4096_starts_and_plans_within_a_bound() -> None:
    expect_bounds("dp64,fsdp8,tp8")


@pytest.mark.slow
@pytest.mark.parametrize("text", SPLITS)
def test_every_split_of_4096_ranks_starts_and_plans_within_a_bound(text: str) -> None:
    expect_bounds(text)


def test_a_compared_call_turns_to_as_few_keys_among_4096_ranks() -> None:
    few, many = (in_a_process("compare_calls", n) for n in (16, NUM_RANKS))
    assert many["keys"] == few["keys"] < 10
    assert many["bytes"] < 1.1 * few["bytes"]
