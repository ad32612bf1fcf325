"""What a run says of its strategy before it begins."""

from __future__ import annotations

import pytest

from phalanx.cli.layout import host_crossing_warnings, tables_of
from phalanx.models.registry import shape_of
from phalanx.report.terminal import text_of
from phalanx.strategy import Strategy


def said(text: str, num_microbatches: int = 4, model: str = "gpt2-124m") -> str:
    return text_of(*tables_of(Strategy.parse(text), shape_of(model), num_microbatches))


def test_one_axis_without_stages_needs_no_words() -> None:
    assert said("dp2") == ""


def test_stages_are_told_with_their_layers_and_cost() -> None:
    text = said("pp2")
    assert "embedding, blocks 0-7" in text
    assert "blocks 8-11, norm and head" in text
    assert "slowest stage / mean: 1.05" in text
    # 2 stages, 4 microbatches: 1/5 of bubble, were they alike.
    assert "4 microbatches a step: ranks wait 22.5 % of it" in text
    assert "would fill" not in text
    assert "batch.accumulation 8 would fill the pipeline" in said("pp4", 2)


@pytest.mark.parametrize(
    ("text", "num_here", "axes"),
    [("tp8", 8, []), ("tp8", 4, ["tp8"]), ("dp2,tp4", 4, []), ("cp2,tp4", 4, ["cp2"])],
)
def test_an_inner_axis_on_several_hosts_is_warned_of(
    text: str, num_here: int, axes: list[str]
) -> None:
    lines = [*host_crossing_warnings(Strategy.parse(text), num_here)]
    assert [line.split()[0] for line in lines] == axes
    if text == "tp8" and lines:
        assert lines[0].endswith("4 of its ranks fit on one host")


def test_lines_fit_a_hundred_columns() -> None:
    text = said("pp4:interleaved/2,tp2", model="llama3-8b")
    assert max(map(len, text.splitlines())) <= 100
