"""The table and the picture of speed in README.md are those of the committed results."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_speed_in_the_readme_is_the_speed_of_the_results() -> None:
    drawn = (ROOT / "docs/speed.svg").read_text()
    speed = runpy.run_path(str(ROOT / "benchmarks/speed.py"))
    assert speed["table"]() in (ROOT / "README.md").read_text()
    for each in speed["COMPARISONS"]:
        assert f">{each.median:.2f}x<" in drawn
        page = each.result.partition("/")[0]
        assert f"{each.median:.2f}x" in (ROOT / f"benchmarks/{page}/README.md").read_text()
