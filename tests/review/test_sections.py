"""What is computed of records for a report."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from phalanx.measure.spans import ComputeSpan, StepSpans
from phalanx.report.inline_svg import HeatMap
from phalanx.review.run_records import read_run
from phalanx.review.sections import BUCKETS, DRAWN_LAYERS, medians_of, sections_of_run, thinned
from recorded_run import config, spans, step, write_run

BOX = re.compile(r"M([\d.]+) [\d.]+h([\d.]+)v")
"""Left and width of a cell of a heat map."""


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


def routing(number: int, num_layers: int, num_experts: int) -> dict[str, Any]:
    counts = [[n % 7 for n in range(num_experts)] for _ in range(num_layers)]
    figures = {"entropy": 0.5, "expert_load": 2.0, "rank_load": 1.5, "dropped": 0.0}
    losses = {"token_loss": 3.0, "aux_loss": 0.5, "z_loss": 0.25}
    layers = {name: [each] * num_layers for name, each in figures.items()}
    place = {"kind": "routing", "step": number, "layers": [*range(num_layers)], "counts": counts}
    return {**place, **layers, **losses, "mean": figures}


def test_the_picture_of_many_experts_is_bounded(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, config("ep2"), *(routing(n, 100, 300) for n in (1, 2))))
    (section,) = [each for each in sections_of_run(run) if each.title == "Routing to experts"]
    maps = [part for part in section.parts if isinstance(part, HeatMap)]
    assert [each.title[:30] for each in maps] == [
        f"Load of each expert in step {n}," for n in (1, 2)
    ]
    for each in maps:
        assert len(each.rows) == 50 <= DRAWN_LAYERS
        assert {len(row) for row in each.rows.values()} == {100} and each.group == 3
        svg = each.svg("/place")
        left, right = zip(*((float(x), float(w)) for x, w in BOX.findall(svg)), strict=True)
        assert min(left) >= 62 and max(x + w for x, w in zip(left, right, strict=True)) <= 640
        height = float(svg.partition('viewBox="0 0 640 ')[2].partition('"')[0])
        assert max(float(y) for y in re.findall(r'[M"]\S+ ([\d.]+)h', svg)) < height


def test_a_run_without_experts_has_no_section_of_them(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, config("dp2"), step(1)))
    assert "Routing to experts" not in [each.title for each in sections_of_run(run)]


def test_a_resumed_run_replaces_the_routing_that_it_records_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path, config("ep2"), *(routing(n, 2, 4) for n in (1, 5, 9, 5)))
    assert [*read_run(folder).routing] == [1, 5]
