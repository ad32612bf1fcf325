"""What the ranks of a run measure of this machine: once, kept for the runs after it."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.comm import Ranks, SingleRankComm
from phalanx.launch.local import run_ranks
from phalanx.planner import calibration, kept_rates
from phalanx.planner.calibration import ASSUMED, blank, keep_measured, kept_by
from phalanx.planner.calibration_file import Calibration, Compute, keep, path_of
from phalanx.planner.hardware import cluster
from phalanx.planner.machine import Core

TODAY = datetime.date.today()
CORE = Core(products={"float32": 8e10}, attention={"float32": 4e10}, operator_s=1e-5)
COMPUTE = dataclasses.replace(ASSUMED, core=CORE, date=str(TODAY), source="measured by a run")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache folder, and the precisions in which a run measured instead of looking."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    def measure(_: object, precision: str) -> Calibration:
        asked.append(precision)
        torch.randn(1)
        return dataclasses.replace(blank("cpu"), compute=COMPUTE)

    rate = CORE.products["float32"] * blank("cpu").num_here
    monkeypatch.setattr(kept_rates, "measure_ranks", measure)
    monkeypatch.setattr(kept_rates, "products_rate", lambda _: rate)
    return asked


def look(precision: str = "float32", *, measures: bool = True) -> Compute | None:
    return kept_rates.machine_of(SingleRankComm(), precision, measures=measures).compute


def test_the_second_run_takes_what_the_first_measured(asked: list[str]) -> None:
    assert look(measures=False) is None and asked == []
    assert look() == look() == look(measures=False) == COMPUTE and asked == ["float32"]
    assert (
        cluster("this:1").device.core == CORE
        and "measured by a run" in cluster("this:1").device.source
    )
    assert (
        "assumed" in calibration.this_machine(2, ASSUMED).device.source
    )  # of another number of ranks


def other(of: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({of: value})


OTHERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "CPU": other("device_name", "Another CPU"),
    "number of cores": other("num_here", 1000),
    "version of torch": other("conditions", "2.11.0"),
    "kind": other("kind", "gpu"),
    "format": other("format", 0),
    "week": lambda of: of["compute"].update(date=str(TODAY - datetime.timedelta(8))),
    "day to come": lambda of: of["compute"].update(date=str(TODAY + datetime.timedelta(1))),
    "date that is none": lambda of: of["compute"].update(date="2026-13"),
    "type": lambda of: of["compute"]["core"]["products"].update(float32=None),
    "load": lambda of: of["compute"]["core"]["products"].update(float32=4e10),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_measurement_of_another_is_measured_anew(name: str, asked: list[str]) -> None:
    look()
    path = path_of("this").with_name("measured-1.json")
    document = json.loads(path.read_text())
    OTHERS[name](document)
    path.write_text(json.dumps(document))
    assert look() == COMPUTE and asked == ["float32"] * 2
    assert kept_by(1, blank("cpu")) is not None  # and kept


def test_a_measurement_draws_no_numbers_of_the_run(asked: list[str]) -> None:
    before = torch.get_rng_state()
    look()
    assert asked and torch.equal(before, torch.get_rng_state())


def test_another_type_is_measured(asked: list[str]) -> None:
    look()
    look("float64")
    assert asked == ["float32", "float64"]


def test_the_file_of_the_user_is_before_what_a_run_kept(asked: list[str]) -> None:
    keep_measured(dataclasses.replace(blank("cpu"), compute=COMPUTE), 1)
    mine = dataclasses.replace(COMPUTE, source="mine")
    keep(path_of("this"), dataclasses.replace(blank("cpu"), compute=mine, conditions="old"))
    assert look() == mine and asked == []
    assert cluster("this:1").device.source == "mine"
    path_of("this").write_text("no calibration")  # plan names it; a run goes on
    assert look() == COMPUTE and asked == []


def test_a_folder_that_cannot_be_written_is_no_error(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert look() == look() == COMPUTE and asked == ["float32"] * 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert look() == COMPUTE and len(asked) == 3


def measure_two() -> Calibration:
    return kept_rates.measure_ranks(Ranks({"dp": 2}), "float64")


@pytest.mark.slow
def test_two_ranks_measure_their_part_and_their_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run_ranks(measure_two, 2, threads=1)
    assert first.is_whole(2) and first.compute is not None and second.compute is not None
    assert (first.compute.core, first.levels) == (second.compute.core, second.levels)
    core, (level,) = first.compute.core, first.levels
    assert core is not None and {"float32", "float64"} <= {*core.products} == {*core.attention}
    assert min(*core.products.values(), *core.attention.values(), core.operator_s, core.in_step) > 0
    assert set(level.link.measured) == set(kept_rates.OPS) and level.link.in_step == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_measured(first, 2)
    assert kept_by(2, blank("cpu"), "float64") == first
    planned = cluster("this:2")
    assert planned.device.core == core and planned.levels == first.levels
    assert planned.device.bandwidth == pytest.approx(first.compute.bandwidth * first.num_here / 2)
