"""The picture of experts on two ranks has the rows, shapes and bytes of the step that ran."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.launch.local import run_ranks
from phalanx.report.terminal import text_of
from phalanx.show import expert_rows
from phalanx.show.animation import draw
from phalanx.show.expert_rows import EXPERTS, LENGTH, ShowExperts, boxes, show_experts
from phalanx.show.shown import Sketch
from phalanx.show.tables import printed


def test_the_picture_is_of_the_step() -> None:
    ranks = run_ranks(expert_rows.take_step, 2, threads=1)
    for rank, step in enumerate(ranks):
        own = [sum(expert in of for of in step.experts) for expert in range(4)]
        assert own == list(step.counts.groups[rank]), (
            "the ranks notified each other of what was routed"
        )
        dispatch, back, *_ = [e.sent for e in step.events if e.what == "all_to_all"]
        row_bytes = 8 * 8
        assert dispatch == row_bytes * step.counts.matrix[rank][1 - rank]
        assert back == row_bytes * step.counts.matrix[1 - rank][rank]
        assert step.shapes["gate"] == [2, 16, 8] and step.shapes["y"] == [LENGTH, 8]
        assert abs(step.losses[0] - step.losses[1]) < 1e-12
    lines = expert_rows.sketch(ranks)
    labelled = {line.split()[0]: line for line in lines if line[:1].isalpha()}
    rows = {name: "".join(re.findall(r"│([a-j])(?=│)", labelled[name])) for name in labelled}
    assert rows["tokens"] == rows["combine"] == "abcdefghij"
    for name in ("sort", "received", "compute"):
        assert sorted(rows[name]) == sorted(EXPERTS.top_k * "abcdefghij"), name
    ways = [int(num) for line in lines for num in re.findall(r"(\d+) rows", line)]
    (_, there), (here, _) = ranks[0].counts.matrix
    assert ways == [there, here, here, there] and there != here
    page = (Path(__file__).parents[2] / "docs/experts.md").read_text(encoding="utf-8")
    assert "\n".join(lines[8:15]) in page, "the page has a part of the picture"


def test_the_topic_fits_100_columns_and_is_drawn(tmp_path: Path) -> None:
    shown = show_experts(ShowExperts())
    (sketch,) = [part for part in shown.parts if isinstance(part, Sketch)]
    assert max(map(len, sketch.lines)) <= 100
    assert all(line in text_of(*printed(shown)) for line in sketch.lines)
    draw(shown, tmp_path / "experts.svg")
    assert "┌─┬─┐" in (tmp_path / "experts.svg").read_text(encoding="utf-8")


def test_boxes_of_groups_one_of_them_empty() -> None:
    assert boxes(["ab", "", "c"]) == ("┌─┬─┐┌┐┌─┐", "│a│b││││c│", "└─┴─┘└┘└─┘")
