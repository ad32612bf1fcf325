"""The coordinates of a chart are its values."""

import re

from phalanx.report.inline_svg import Chart


def test_areas_are_stairs_on_top_of_the_areas_before() -> None:
    series = {"one": [[0.0, 10.0], [1.0, 10.0]], "two": [[0.0, 20.0], [1.0, 0.0]]}
    svg = Chart("", "x", "y", series, is_stacked=True, planned=40.0).svg("")
    paths = re.findall(r'class="area (c\d)" d="M[\d.]+ ([\d.]+)V([\d.]+)H[\d.]+V([\d.]+)V', svg)
    areas = {color: [*map(float, ys)] for color, *ys in paths}
    assert [*areas] == ["c1", "c0"]  # the first is drawn over those above it
    zero, ten, _ = areas["c0"]
    assert areas["c1"] == [zero, round(zero - 3 * (zero - ten), 1), ten]
    assert f"{zero - 4 * (zero - ten):.1f}H" in svg  # the prediction
