"""What the planner predicts of a run: a time only where the rates of the machine were measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from phalanx.account.planned import decoder_step
from phalanx.comm.ledger import Entry
from phalanx.config import BatchConfig, ShapeConfig
from phalanx.measure.memory import Kind
from phalanx.measure.memory_report import MemoryReport
from phalanx.measure.summary import StepSummary
from phalanx.measure.timer import TERMS
from phalanx.models.registry import shape_of
from phalanx.planner.calibration import ASSUMED, blank
from phalanx.planner.calibration_file import Calibration
from phalanx.planner.hardware import DEVICES
from phalanx.planner.machine import Level, Link
from phalanx.strategy import Strategy
from phalanx.train.report.prediction import UNMEASURED, PredictionReport, predict
from phalanx.train.run import train
from small_run import small_run

LINK = Link(name="memory", bandwidth=1e9, latency_s=1e-4, source="a test", date="2026-11-28")
BARE = blank("cpu")
TIMED = dataclasses.replace(BARE, compute=dataclasses.replace(ASSUMED, source="measured in a test"))
WHOLE = dataclasses.replace(TIMED, levels=(Level(name="server", devices=2, link=LINK),))


STEP_S = dict.fromkeys(TERMS, 0.0) | {"forward": 0.5, "backward": 0.5}
STEPS = StepSummary(num_steps=1, wall_s=1.0, medians_s=STEP_S, shares=STEP_S)
KINDS = dict.fromkeys(get_args(Kind), 1 << 20)
HELD = MemoryReport(
    at_peak=KINDS, at_most=KINDS, at_end=KINDS, peak_phase="backward", passing_bytes=3 << 20,
    largest_bytes=1 << 30, resident_bytes=1 << 30,
)  # fmt: skip


def predicted(
    strategy: str, machine: Calibration, precision: str = "float32", **measured: Any
) -> PredictionReport:
    step = decoder_step(shape_of("demo"), Strategy.parse(strategy), 128, 1, 1, precision)
    report = predict(step, machine, **{"steps": STEPS, "memory": HELD} | measured)
    assert report is not None
    return report


def test_a_time_is_predicted_of_measured_rates_alone() -> None:
    for strategy, timed in {"dp2": [False, False, True], "dp1": [False, True, True]}.items():
        reports = [predicted(strategy, of) for of in (BARE, TIMED, WHOLE)]
        assert [of.is_timed for of in reports] == [bool(of.time_s) for of in reports] == timed
        assert reports[0].bytes == reports[2].bytes
    assert predicted("dp2", WHOLE).machine == "measured in a test, 2026-11; links: a test"


def test_an_error_is_printed_of_measured_rates_alone() -> None:
    sent = [Entry(phase, "dp", "all_reduce", 1, 8, 2**20) for phase in ("backward", "clip")]
    report = predicted("dp2", WHOLE, memory=None, entries=sent)
    assert ") a step; rates: measured in" in report.line()
    assert set(report.errors) == {"step", "compute", "communication", "bubble", "optimizer"}
    assert report.sent["dp"].measured == 2**20, "a clip's few bytes are left out"
    report = predicted("dp2", BARE)
    assert "step" not in report.errors and report.bytes["parameters"].error != 0
    assert report.line().endswith(f"at the peak; {UNMEASURED}")


def test_a_gpu_without_a_known_peak_has_no_time() -> None:
    """A B200 has products of 64 bits, but the catalogue knows no rate of them."""
    gpu = dataclasses.replace(WHOLE, kind="gpu", device_name=DEVICES["b200"].driver, num_here=2)
    found = [predicted("dp2", gpu, name) for name in ("bfloat16", "float32", "float64")]
    assert [each.is_timed for each in found] == [True, True, False]
    assert all(each.bytes["peak"].predicted > 0 for each in found)


SHAPE = ShapeConfig(
    num_layers=4, hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn=160, vocab_size=512,
    max_seq_len=128,
)  # fmt: skip
TWELVE = (
    *("dp2", "dp2:naive", "fsdp2", "fsdp2:zero2", "fsdp2:zero1", "tp2", "cp2", "cp2:ulysses"),
    *("pp2", "pp2:gpipe", "dp2,recompute:full", "dp2,fsdp2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("text", TWELVE)
def test_bytes_and_memory_are_as_planned(text: str, tmp_path: Path) -> None:
    strategy = Strategy.parse(text)
    batch = BatchConfig(global_size=16, microbatch=4)
    settings = {"strategy": text, "steps": 3, "precision": "float32", "shape": SHAPE}
    config = small_run(tmp_path, 2000, **settings, batch=batch)
    config = dataclasses.replace(
        config, corpus=dataclasses.replace(config.corpus, seq_len=128, vocab_size=512)
    )
    summary = train(config)
    accumulation = 4 // strategy.data_ranks
    sizes = {name: size for name, size in vars(SHAPE).items() if size is not None}
    shape = dataclasses.replace(shape_of("demo"), **sizes)
    step = decoder_step(shape, strategy, 128, 4, accumulation, "float32", has_documents=True)
    sent = {of for of in summary.sent if of.phase not in ("count", "clip", "metrics")}
    assert sent == set(step.plan.traffic([(4, 128)] * accumulation))
    assert summary.predicted is not None and summary.predicted.is_timed
    peak = summary.predicted.bytes["peak"]
    assert peak.predicted == pytest.approx(peak.measured, rel=0.1)
