"""What is computed of records for a report."""

from __future__ import annotations

import math
from pathlib import Path

from phalanx.measure.spans import ComputeSpan, StepSpans
from phalanx.review.run_records import read_run
from phalanx.review.sections import BUCKETS, medians_of, sections_of_run, thinned
from recorded_run import config, spans, step, write_run


def test_a_long_curve_keeps_its_ends_and_the_extremes_of_each_part() -> None:
    xs = [float(at) for at in range(100_000)]
    ys = [math.sin(x / 700) for x in xs]
    ys[77_777], ys[5], ys[11] = 40.0, -40.0, math.nan
    points = thinned(xs, ys)
    assert len(points) <= 2 * BUCKETS + 2 and points == sorted(points)
    assert [77_777.0, 40.0] in points and [5.0, -40.0] in points
    assert points[0][0] == 0 and points[-1][0] == 99_999
    assert thinned([1, 2, 3], [1, math.nan, 2]) == [[1, 1], [3, 2]]


def test_a_resumed_run_has_medians_of_its_last_process(tmp_path: Path) -> None:
    steps = [step(at, 1.0) for at in range(1, 9)], [step(at, 0.5) for at in range(5, 13)]
    folder = write_run(tmp_path, config("dp2"), *steps[0], config("dp4"), *steps[1])
    medians_s, num_steps = medians_of(read_run(folder))
    assert (num_steps, medians_s["step"]) == (5, 0.5)


def test_a_run_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    first, *_ = sections_of_run(read_run(write_run(tmp_path, config("dp2"))))
    assert first.values()[1] == "no step was recorded"
    for rank in (0, 1):
        spans(tmp_path / "own", rank)  # a loop of the user's own has no records
    line = '{"rank": 0, "at_s": 1.0, "offset_s": 0.0, "error_s": 0.0}\n'  # the disk was full
    (tmp_path / "own/trace/clock.jsonl").write_text(line)
    titles = [section.title for section in sections_of_run(read_run(tmp_path / "own"))]
    assert "A profiled step" in titles


def test_the_step_is_drawn_of_the_ranks_that_took_it(tmp_path: Path) -> None:
    """A run of three ranks is resumed on two, and killed before one wrote its last step."""
    folder = write_run(tmp_path, config("dp2"))
    for number, num_ranks, written in ((4, 3, 3), (5, 2, 2), (6, 2, 1)):
        for rank in range(written):
            StepSpans(
                step=number, rank=rank, num_ranks=num_ranks, host="a", strategy="", axes={},
                coords={}, begin_s=0.0, end_s=1.0, unix_s=1e9, terms_s={},
                spans=[ComputeSpan(0.0, 1.0, "forward", "forward")],
            ).write(folder)  # fmt: skip
    sections = {each.title: each.values() for each in sections_of_run(read_run(folder))}
    assert sections["A profiled step"][0] == "Step 5, profiled on 2 ranks."
