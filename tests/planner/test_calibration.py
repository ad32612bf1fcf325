"""The calibration file: it reads back to a cluster, whose CPU devices share the cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.planner.calibration import as_cluster, blank
from phalanx.planner.calibration_file import Calibration, Compute, keep, path_of, read
from phalanx.planner.hardware import DEVICES, cluster
from phalanx.planner.machine import Level, Link, OpCost, ring

COMPUTE = Compute(
    best={"float32": 4e10, "bfloat16": 2e11},
    sustained={"float32": 3e10, "bfloat16": 1.5e11},
    bandwidth=1e10,
    memory_bytes=2e9,
    date="2026-01-02",
)
LINK = Link(
    name="gloo",
    bandwidth=1.5e9,
    latency_s=2e-4,
    source="measured",
    date="2026-01",
    measured={"send": OpCost(latency_s=1e-4, bandwidth=4e9)},
)
SERVER = Level(name="server", devices=4, link=LINK)
CPU = Calibration(kind="cpu", device_name="A CPU", num_here=4, compute=COMPUTE, levels=(SERVER,))


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cpu.json"
    keep(path, CPU)
    assert read(path) == CPU
    found = cluster(str(path))
    assert found.num_devices == 4 and found.levels == (SERVER,)
    assert found.device.flops == 2e11 and found.device.matmul_efficiency == 0.75
    assert found.device.memory_bytes == 2e9


def test_ranks_share_the_cores() -> None:
    four, eight, two = (as_cluster("this", CPU, num) for num in (4, 8, 2))
    assert four.totals == eight.totals == two.totals
    assert eight.device.bandwidth == 0.5e10 and two.device.bandwidth == 2e10
    assert [level.devices for level in eight.levels] == [8]


def test_rates_that_no_file_has_are_called_measured_for_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The summary of a run predicts by rates of the run instead, which differ."""
    monkeypatch.setattr("phalanx.measure.products.quick_ceiling", lambda *_: 4e10)
    monkeypatch.setattr("phalanx.planner.calibration.compute_of", lambda *_, **__: COMPUTE)
    sources = [as_cluster("this", replace(CPU, compute=of)).device.source for of in (None, COMPUTE)]
    assert sources == ["measured on this machine for this plan", "measured on this machine"]


def test_what_two_benchmarks_measure_is_kept_together(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    keep(path, replace(CPU, compute=None, num_hosts=2))
    keep(path, replace(CPU, levels=()))
    other = replace(COMPUTE, best={"float64": 1e9}, sustained={"float64": 1e9})
    keep(path, replace(CPU, levels=(), compute=other))
    kept = read(path)
    assert kept.levels == (SERVER,) and kept.num_hosts == 2 and kept.compute is not None
    assert set(kept.compute.best) == {"float32", "bfloat16", "float64"}
    keep(path, replace(CPU, device_name="Another CPU", levels=()))
    assert read(path).levels == ()


def test_hosts_are_a_level() -> None:
    outer = Level(name="cluster", devices=8, link=replace(LINK, name="between"))
    found = as_cluster("x.json", replace(CPU, levels=(SERVER, outer), num_hosts=2))
    assert [(level.name, level.devices) for level in found.levels] == [
        ("server", 4),
        ("cluster", 8),
    ]
    assert found.levels[1].link.name == "between"
    one_each = replace(CPU, num_here=1, levels=(replace(outer, devices=2),), num_hosts=2)
    assert [level.name for level in as_cluster("x.json", one_each).levels] == ["cluster"]


def test_a_gpu_of_the_catalogue_takes_its_measured_efficiency() -> None:
    fast = replace(COMPUTE, best={"bfloat16": 0.7 * 989.4e12}, sustained={"bfloat16": 1e14})
    gpu = Calibration(
        kind="gpu", device_name=DEVICES["h100"].driver, num_here=8, compute=fast, levels=(SERVER,)
    )
    found = as_cluster("this", gpu)
    assert found.device.matmul_efficiency == pytest.approx(0.7)
    assert found.device.chip == DEVICES["h100"].chip and found.num_devices == 8
    unlinked = as_cluster("this", replace(gpu, levels=(), compute=None), 2)
    assert unlinked.levels[0].link.name == "NVLink 4" and unlinked.num_devices == 2
    with pytest.raises(ConfigError, match="1 to 8 devices, not 9"):
        as_cluster("this", gpu, 9)


def test_the_file_in_the_cache_is_that_of_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("phalanx.account.host.may_have_gpu", lambda: False)
    monkeypatch.setattr("phalanx.planner.calibration.measure", lambda *_: COMPUTE)
    here = blank("cpu")
    keep(path_of("this"), replace(CPU, device_name=here.device_name, num_here=64))
    found = cluster("this:2")
    assert found.levels[0].link == LINK
    assert found.totals.flops == here.num_here * 2e11
    keep(path_of("this"), replace(CPU, device_name="another machine"))
    assert "assumed" in cluster("this:2").levels[0].link.source


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1}', '{"format": 0, "levels": []}', '"format"', "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.json is not a calibration of this version"):
        cluster(str(path))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"num_here": 4', '"num_here": 0', "num_here is 0"),
        ('"num_here": 4', '"num_here": true', "num_here is True"),
        ('"kind": "cpu"', '"kind": "tpu"', "kind is 'tpu'"),
        ('"latency_s": 0.0002', '"latency_s": "late"', "latency_s is 'late'"),
        ('"bandwidth": 1500000000.0', '"bandwidth": -1', "bandwidth is -1"),
        ('"bfloat16": 200000000000.0', '"bfloat16": NaN', "best of bfloat16 is nan"),
        ('"bfloat16": 200000000000.0', '"int8": 1.0', "best has rates of"),
        ('"date": "2026-01-02"', '"date": "today"', "date is 'today'"),
        ('"num_hosts": 1', '"num_host": 1', "the unknown entry 'num_host'"),
    ],
)
def test_a_value_out_of_range_is_named(before: str, after: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    keep(path, CPU)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        cluster(str(path))
    assert said in str(caught.value)


def test_a_name_without_its_ending() -> None:
    with pytest.raises(ConfigError, match=r"expected 'this', .* or a name such as mine\.json"):
        path_of("mine")


def test_hops_and_bytes_of_a_ring() -> None:
    """Each rank sends (n - 1) / n of the tensor, twice in an all-reduce (Patarasu, Yuan, 2009)."""
    assert ring("all_reduce", 4, 100) == (6, 150)
    assert ring("all_gather", 4, 100) == ring("reduce_scatter", 4, 100) == (3, 75)
    assert ring("send", 4, 100) == (1, 100)
