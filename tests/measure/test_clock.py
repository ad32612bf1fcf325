"""Clocks of ranks are compared over the job's store, and the printed errors bound the true ones."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.comm import Ranks
from phalanx.comm.join import job_store
from phalanx.launch.local import run_ranks
from phalanx.measure import clock
from phalanx.measure.clock import (
    CLOCK,
    Comparison,
    compare,
    comparison_of,
    offset,
    read_comparisons,
)
from phalanx.strategy import Strategy

AHEAD_S, PPM = 3.0, 50e-6
true_clock = time.perf_counter


def bent(t_s: Any, since_s: float) -> Any:
    """The time of a clock that was AHEAD_S ahead at `since_s`, and drifts since."""
    return t_s + AHEAD_S + PPM * (t_s - since_s)


def compare_bent(folder: str, since_s: float) -> int:
    comm = Ranks(Strategy.parse("dp3"))
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(time, "perf_counter", lambda: bent(true_clock(), since_s))
        compare(Path(folder), comm)
        time.sleep(0.2)
        compare(Path(folder), comm)
    dist.barrier()
    return job_store().num_keys()


def test_a_bent_clock_is_measured_over_the_store(tmp_path: Path) -> None:
    since_s = true_clock()
    first = run_ranks(compare_bent, 3, str(tmp_path), since_s, threads=1)
    again = run_ranks(compare_bent, 3, str(tmp_path), since_s, threads=1)
    assert len(set(first + again)) <= 2  # no key of a round is left
    lines = [json.loads(line) for line in (tmp_path / CLOCK).read_text().splitlines()]
    assert [line["rank"] for line in lines] == 4 * [0, 1, 2]
    known = read_comparisons(tmp_path)
    true_s = np.array([line["at_s"] for line in lines if line["rank"] == 2])
    for rank, own_s in ((0, true_s), (1, bent(true_s, since_s)), (2, true_s)):
        offset_s, error_s = offset(known[rank], own_s)
        assert (abs(own_s - offset_s - true_s) <= error_s + 1e-9).all()
        assert (error_s < 1.0).all() and (rank or not error_s.any())


@given(st.integers(), st.floats(-50e-6, 50e-6), st.lists(st.floats(0, 0.1), min_size=4))
def test_errors_bound_the_true_ones_inside_and_outside_of_the_comparisons(
    seed: int, drift: float, delays_s: list[float]
) -> None:
    ahead_s = seed % 1000 / 7.0

    def other(t_s: Any) -> Any:
        return (1 + drift) * t_s + ahead_s

    made: list[Comparison] = []
    for begin_s in (100.0, 130.0):
        t_s, rounds = begin_s, list[tuple[float, float, float]]()
        for there_s, back_s in zip(delays_s[::2], delays_s[1::2], strict=False):
            rounds.append((t_s, other(t_s + there_s), t_s + there_s + back_s))
            t_s += there_s + back_s
        made.append(comparison_of(1, rounds))
    narrowest_s = min(a + b for a, b in zip(delays_s[::2], delays_s[1::2], strict=False))
    for ends in (made, made[:1], made[1:]):
        true_s = np.array([90.0, 100.0, 115.0, 130.0, 150.0])
        offset_s, error_s = offset(ends, other(true_s))
        assert (abs(other(true_s) - offset_s - true_s) <= error_s + 1e-9).all()
    _, error_s = offset(made, [each.at_s for each in made])
    assert (error_s <= narrowest_s + clock.DRIFT * 2 * sum(delays_s) + 1e-9).all()


def test_where_a_clock_was_set_the_nearest_comparison_holds() -> None:
    made = [Comparison(1, 10.0, 5.0, 1e-4), Comparison(1, 20.0, 900.0, 1e-4)]
    offset_s, error_s = offset(made, [11.0, 19.0])
    assert offset_s.tolist() == [5.0, 900.0]
    assert error_s == pytest.approx([1e-4 + clock.DRIFT] * 2)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    line = '{"rank": 0, "at_s": 1.0, "offset_s": 0.0, "error_s": 0.0}\n'
    (tmp_path / CLOCK).write_bytes(line.encode() + b"\xff\n" + line[:-20].encode())
    assert read_comparisons(tmp_path) == {0: [Comparison(0, 1.0, 0.0, 0.0)]}
