"""What the planner predicts of a run: nothing where no peak of the device is known."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.account.planned import decoder_step
from phalanx.models.registry import shape_of
from phalanx.planner.calibration import as_cluster, blank
from phalanx.planner.hardware import cluster
from phalanx.strategy import Strategy
from phalanx.train.report import prediction


def test_a_run_without_a_known_peak_has_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A B200 has products of 64 bits, but the catalogue knows no rate of them."""
    monkeypatch.setattr(prediction, "this_machine", lambda *_: cluster("b200:1"))
    found = [
        prediction.predict(decoder_step(shape_of("demo"), Strategy(), 128, 1, 1, name), None)
        for name in ("bfloat16", "float32", "float64")
    ]
    assert [each is None for each in found] == [False, False, True]


def test_a_prediction_says_what_was_measured_and_what_is_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        prediction,
        "this_machine",
        lambda num, of: as_cluster("this", dataclasses.replace(blank("cpu"), compute=of), num),
    )
    texts: list[str] = []
    for strategy in ("dp1", "dp2"):
        step = decoder_step(shape_of("demo"), Strategy.parse(strategy), 128, 1, 1, "float32")
        found = prediction.predict(step, 1e11)
        assert found is not None
        texts.append(found.machine)
    alone, of_two = texts
    assert alone.startswith("matrix products measured in this run, 20")
    assert of_two.startswith(
        f"{alone}, links assumed to have 1 GB/s until phalanx bench comm --write"
    )
