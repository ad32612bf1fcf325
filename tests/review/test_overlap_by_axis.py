"""Overlap of communication with arithmetic, from spans whose overlap is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_spans import collective, compute, wait

from phalanx.measure.spans import Span, StepSpans
from phalanx.report.terminal import text_of
from phalanx.review.overlap_by_axis import overlap_of


def step_of(*spans: Span) -> StepSpans:
    return StepSpans(
        step=1, rank=0, num_ranks=2, host="a", strategy="fsdp2", axes={"fsdp": 2},
        coords={"fsdp": 0}, begin_s=0.0, end_s=1.0, unix_s=0.0, terms_s={}, spans=[*spans],
    )  # fmt: skip


def travel(begin_s: float, end_s: float, op: str, label: str, axis: str = "fsdp") -> Span:
    return collective(begin_s, end_s, op, axis, (0, 1), 0, None, label)


def test_each_second_under_way_has_one_kind() -> None:
    overlap = overlap_of(
        [
            step_of(
                travel(0.0, 0.6, "all_reduce", "bucket 0", "dp"),
                travel(0.3, 0.9, "all_reduce", "bucket 1", "dp"),  # at the same time, counts once
                compute(0.0, 0.4, "backward", "layers.0"),
                wait(0.4, 0.5, "tp"),
                wait(0.5, 0.6, "pp", "bubble"),
                compute(0.6, 0.7, "backward"),
                wait(0.7, 1.0, "dp"),  # for longer than the collective was seen
            ),
            step_of(),  # another rank, without communication
        ]
    )
    dp, tp, pp = overlap.axes
    assert dp.pop("axis") == "dp"
    assert dp == pytest.approx({
        "under_way_s": 0.5, "hidden_s": 0.25, "exposed_s": 0.15, "beside_s": 0.1,
        "hidden_share": 0.5,
    })  # fmt: skip
    assert (tp["exposed_s"], tp["hidden_s"]) == pytest.approx((0.05, 0.0))
    assert (pp["under_way_s"], pp["hidden_share"]) == (0.0, None)  # a bubble is no communication


def test_what_travels_beneath_the_backward_of_a_block() -> None:
    step = step_of(
        *(compute(0.1 * n, 0.1 * n + 0.1, "backward", f"layers.{3 - n}") for n in range(4)),
        travel(0.1, 0.16, "all_gather", "layers.1"),  # beneath backward 2
        travel(0.1, 0.18, "reduce_scatter", "layers.3"),
        travel(0.19, 0.29, "reduce_scatter", "layers.2"),  # beneath backward 1, and a bit of 2
    )
    overlap = overlap_of([step, step])
    found = [(each["part"], each["op"], each["label"]) for each in overlap.beneath]
    assert found == [
        ("layers.2", "all_gather", "layers.1"),
        ("layers.2", "reduce_scatter", "layers.3"),
        ("layers.1", "reduce_scatter", "layers.2"),
    ]
    assert overlap.beneath[1]["seconds"] == pytest.approx(0.16)
    assert overlap.beneath[1]["share_of_part"] == pytest.approx(0.8)
    assert overlap.beneath[2]["share_of_collective"] == pytest.approx(0.9)
    assert "backward layers.2  all_gather layers.1" in text_of(*overlap.tables())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(1, 9)), max_size=12))
def test_kinds_sum_to_the_time_under_way(chosen: list[tuple[int, int, int]]) -> None:
    spans: list[Span] = []
    for kind, begin, length in chosen:
        begin_s, end_s = begin / 50, (begin + length) / 50
        if kind < 2:
            spans.append(travel(begin_s, end_s, "all_reduce", "", "dp" if kind else "tp"))
        else:
            spans.append(wait(begin_s, end_s, "dp", "bubble" if kind == 4 else "communication"))
    for each in overlap_of([step_of(*spans)]).axes:
        parts = [each[f"{kind}_s"] for kind in ("hidden", "exposed", "beside")]
        assert all(part >= -1e-9 for part in parts)
        assert sum(parts) == pytest.approx(each["under_way_s"])
