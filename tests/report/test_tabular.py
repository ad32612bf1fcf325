"""One table as a value: printed, drawn and in JSON."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.report.output import json_text
from phalanx.report.svg import SvgDrawing
from phalanx.report.tabular import Line, Number, Table
from phalanx.report.terminal import text_of
from phalanx.report.units import percent

TABLE = Table(
    "Phases",
    ("phase", Number("median ms", ".1f", 1e-3), Number("share", percent), "ranks"),
    [("forward", 0.0125, 0.25, "0"), (Line("all", "bold"), 1.5, None, "10"), ("late", "-", 1, "2")],
    numbers=["ranks"],
    note="of 3 steps",
)


def test_numbers_are_printed_in_the_unit_of_their_head() -> None:
    assert text_of(TABLE).splitlines() == [
        "Phases",
        "phase    median ms    share  ranks",
        "forward       12.5   25.0 %      0",
        "all         1500.0              10",
        "late             -  100.0 %      2",
        "of 3 steps",
    ]


def test_json_has_the_numbers_and_svg_the_texts(tmp_path: Path) -> None:
    assert json.loads(json_text(TABLE))["rows"][0] == ["forward", 0.0125, 0.25, "0"]
    drawing = SvgDrawing(400, 100)
    drawing.table(TABLE, 0, 0)
    drawing.write(tmp_path / "table.svg")
    text = (tmp_path / "table.svg").read_text()
    assert all(f">{cell}<" in text for cell in ("Phases", "12.5", "25.0 %", "all", "10"))
