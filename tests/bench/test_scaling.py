"""bench scaling: what it times, and that no speed-up above the number of ranks is given."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx.cli.bench as bench
from phalanx.bench.scaling import ScalingPoint
from phalanx.errors import PhalanxError

SECONDS = st.floats(1e-6, 1e3)


@given(st.integers(1, 64), st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9))
def test_a_speed_up_keeps_its_bound_or_is_not_given(
    num_ranks: int, times: list[tuple[float, float]]
) -> None:
    one, many = zip(*times, strict=True)
    point = ScalingPoint("dpN", num_ranks, many, one)
    assert point.batches_per_s > 0
    if point.speed_up is None:
        assert max(point.speed_ups) > num_ranks and point.efficiency is None
    else:
        assert 0 < point.speed_up <= num_ranks
        assert point.efficiency is not None and 0 < point.efficiency <= 1


def test_a_figure_that_cannot_be_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [ScalingPoint("dp1", 1, (4.0,), (4.0,)), ScalingPoint("dp2", 2, (1.0,), (4.0,))]
    monkeypatch.setattr("phalanx.bench.scaling.measure_scaling", lambda *_: found)
    assert bench.run(["scaling", "dp2"]) == 0
    shown = capsys.readouterr().out
    assert "4.00" not in shown.split("dp2", 1)[1]
    assert "no speed-up of dp2: it came out above the number of ranks" in shown


def test_each_strategy_takes_the_same_batch_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape.num-layers 1 --shape.hidden 16 --shape.num-heads 2 --shape.num-kv-heads 2"
    sizes += " --shape.head-dim 8 --shape.ffn 32 --shape.vocab-size 64 --seq-len 8"
    words = f"scaling dp2 fsdp2 {sizes} --rounds 2 --steps 1 --device cpu --json"
    assert bench.run(words.split()) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert shown[0] == "round 1 of 2: dp1, dp2, fsdp2 ..."
    points = json.loads(last)["points"]
    assert [point["strategy"] for point in points] == ["dp1", "dp2", "fsdp2"]
    assert points[0]["speed_up"] == 1
    for point in points:
        assert len(point["times_s"]) == 2
        assert point["tokens_per_s"] == pytest.approx(8 * 8 * point["batches_per_s"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dp3", "6 and 9 are the nearest"),
        ("dp2 --rounds 0", "rounds is 0; expected at least 1"),
        ("dp2 --seq-len 100000", "the nearest is"),
        ("tp4:2d --global-size 1", "splits rows into 2; the nearest is 2"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(words: str, expected: str) -> None:
    with pytest.raises(PhalanxError, match=expected):
        bench.run(["scaling", *words.split()])
