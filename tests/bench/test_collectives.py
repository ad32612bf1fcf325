"""bench comm: it finds known links in their times, and keeps the links that it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx.cli.bench as bench
from forked_torchrun import run_two
from phalanx.bench.collectives import (
    OPS,
    TRAINING_ENGINE,
    CommConfig,
    Sample,
    fit,
    fit_samples,
    levels_of,
    slowest_samples,
    time_rank,
)
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.planner.calibration_file import read
from phalanx.planner.machine import ring

SIZES = [4 << 10 << 2 * power for power in range(7)]


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12), st.sampled_from(OPS), st.integers(2, 9))
def test_a_link_is_found_again_in_its_times(
    latency_s: float, bandwidth: float, op: str, num_ranks: int
) -> None:
    samples: list[Sample] = []
    for size in SIZES:
        hops, sent = ring(op, num_ranks, size)
        time_s = hops * latency_s + sent / bandwidth
        samples.append(Sample(axis="tp", op=op, num_ranks=num_ranks, num_bytes=size, time_s=time_s))
    (found,) = fit_samples(samples)
    assert found.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-2)
    assert found.largest_error < 1e-2


@given(st.lists(st.floats(1e-7, 10.0), min_size=2, max_size=7))
def test_a_fit_of_noise_is_no_negative_time(times_s: list[float]) -> None:
    latency_s, per_byte_s = fit([(1, size, t) for size, t in zip(SIZES, times_s, strict=False)])
    assert latency_s >= 0 and per_byte_s > 0


def test_two_ranks_are_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.json"
    words = f"comm --ranks 2 --device cpu --max-mib 1 --repeats 1 --json --write {path}"
    assert bench.run(words.split()) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert f"wrote {path}" in shown
    document = json.loads(last)
    engines = ("shared memory", "gloo")
    assert [(one["engine"], one["op"]) for one in document["fits"]] == [
        (engine, op) for op in OPS for engine in engines
    ]
    assert len(document["samples"]) == 2 * len(OPS) * 5  # 4 KiB to 1 MiB, 4 times larger each
    assert {sample["num_wrong"] for sample in document["samples"]} == {0}
    assert max(map(len, shown)) <= 100
    (level,) = read(path).levels
    assert level.devices == 2
    of = {one["op"]: one for one in document["fits"] if one["engine"] == TRAINING_ENGINE}
    assert set(level.link.measured) == set(OPS)
    assert level.link.bandwidth == of["all_reduce"]["bandwidth"] > 0
    assert level.link.measured["send"].latency_s == of["send"]["latency_s"]


@pytest.mark.slow
def test_hosts_are_measured_apart() -> None:
    config = CommConfig(max_mib=1, repeats=1, device="cpu")
    samples = slowest_samples(run_ranks(time_rank, 4, config, 2))  # as on two hosts of two ranks
    levels = levels_of(list(fit_samples(samples)), 2, 1.5)
    assert [(level.name, level.devices) for level in levels] == [("server", 2), ("cluster", 4)]


@pytest.mark.slow
def test_ranks_of_torchrun_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    words = f"bench comm --device cpu --max-mib 1 --repeats 1 --write {path}"
    ended = run_two("-m", "phalanx", *words.split())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("reduce_scatter") == 2 * (5 + 1)  # the first rank speaks
    assert set(read(path).levels[0].link.measured) == set(OPS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("comm --ranks 1", "ranks"),
        ("comm --write mine", "'mine' is not a calibration file; expected 'this'"),
        (
            "comm --ranks 2 --device cuda",
            "2 ranks on CUDA: expected 2 or more, with a GPU each; found 0 GPUs",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=said):
        bench.run(words.split())
