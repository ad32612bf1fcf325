"""The hardware catalogue beside figures that its sources print, and what its names stand for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.planner.hardware import CLUSTERS, DEVICES, cluster, device
from phalanx.planner.machine import Device


def test_the_chain_from_an_sm_to_the_peak() -> None:
    """The architecture papers: SMs built and enabled, FLOPs a clock, clock, peak."""
    h100 = device("h100").chip
    assert h100 is not None
    assert (h100.sms_built, h100.sms, h100.flops_per_clock) == (144, 132, 4096)
    assert 132 * 4096 * 1.83e9 == pytest.approx(device("h100").peak_flops["bfloat16"], rel=0.005)
    for one in DEVICES.values():
        if one.chip is not None:
            assert one.chip.flops == pytest.approx(one.flops, rel=0.005), one.name
            assert one.chip.sms < one.chip.sms_built, one.name


def test_the_cluster_of_llama_3() -> None:
    found = cluster("h100-llama3")
    units = [(level.name, level.devices) for level in found.levels]
    assert units == [("server", 8), ("rack", 2 * 8), ("pod", 192 * 16), ("cluster", 8 * 3072)]
    totals = found.totals
    assert f"{totals.flops / 1e18:.1f}" == "24.3"
    assert f"{totals.fp32_cores / 1e6:.0f}" == "415"
    assert f"{totals.tensor_cores / 1e6:.0f}" == "13"
    assert f"{totals.memory_bytes / 1e15:.2f}" == "1.97"
    bandwidths = [level.link.bandwidth for level in found.levels]
    assert bandwidths == pytest.approx([450e9, 50e9, 50e9, 50e9 / 7])


def test_a_pod_of_tpu_v5p() -> None:
    """How To Scale Your Model: 8,960 chips, 4 EFLOP/s; all six links are counted once."""
    pod = cluster("tpu-v5p-pod")
    assert pod.num_devices == 16 * 20 * 28
    assert pod.totals.flops == pytest.approx(4e18, rel=0.05)
    assert sum(level.link.bandwidth for level in pod.levels) == 6 * 90e9


def test_from_a100_to_h100() -> None:
    """Arithmetic grew 3.2 times and bandwidth 2.2 times: fewer FLOPs can be fed."""
    old, new = device("a100-40"), device("h100")
    assert new.flops / old.flops == pytest.approx(3.2, abs=0.05)
    assert new.bandwidth / old.bandwidth == pytest.approx(2.2, abs=0.05)
    assert new.flops_per_byte > old.flops_per_byte


@pytest.mark.parametrize(("name", "one"), list(DEVICES.items()))
def test_each_figure_has_a_source_and_is_in_its_unit(name: str, one: Device) -> None:
    assert one.name == name
    assert one.source and one.efficiency_source and re.fullmatch(r"20\d\d-\d\d", one.date)
    assert 1e14 < one.flops < 1e16
    assert 1e10 < one.memory_bytes < 4e11 and 0.9 < one.usable_bytes / one.memory_bytes < 1.1
    assert 5e11 < one.bandwidth < 1e13 and 0.4 < one.matmul_efficiency < 1
    for found in (CLUSTERS[name], *(c for c in CLUSTERS.values() if c.device is one)):
        sizes = [level.devices for level in found.levels]
        assert sizes == sorted(set(sizes)) and sizes[-1] == found.num_devices
        for level in found.levels:
            assert 1e9 < level.link.bandwidth < 1e12 and 1e-7 < level.link.latency_s < 1e-3
            assert level.link.source and re.fullmatch(r"20\d\d-\d\d", level.link.date)


def test_a_part_of_a_cluster_keeps_the_levels_that_join_it() -> None:
    found = cluster("h100-llama3:16384")
    assert found.num_devices == 16384 and len(found.levels) == 4
    assert [level.name for level in cluster("h100-llama3:3072").levels] == ["server", "rack", "pod"]
    assert [level.name for level in cluster("h100:8").levels] == ["server"]
    assert [level.name for level in cluster("h100:9").levels] == ["server", "cluster"]
    assert cluster("gb200:72").levels[0].link.name == "NVLink 5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100-llama", "'h100-llama' is not a cluster .*did you mean 'h100-llama3'"),
        ("H100", "did you mean 'h100'"),
        ("h100-llama3:0", "1 to 24,576 devices, not 0; the nearest is h100-llama3:1"),
        ("h100-llama3:30000", "not 30,000; the nearest is h100-llama3:24576"),
        ("h100:many", "'many' is not a number of devices; expected h100:N"),
        ("missing.json", "missing.json: there is no such file; phalanx bench comm --write"),
        ("h100:", "'' is not a number"),
        ("", "'' is not a cluster"),
    ],
)
def test_bad_clusters_get_the_nearest_legal_value(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster(text)


def test_a_bad_device_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'mi300' is not a device .*did you mean 'mi300x'"):
        device("mi300")


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no calibration
    found = cluster("this")
    assert found.num_devices >= 1 and found.levels[-1].devices == found.num_devices
    assert 1e8 < found.device.flops < 1e16 and 1e8 < found.device.bandwidth < 1e13
    assert "assumed" in found.levels[0].link.source or found.device.kind == "gpu"
    with pytest.raises(ConfigError, match=r"the nearest is this:1$"):
        cluster("this:0")


def test_the_catalogue_loads_no_torch() -> None:
    code = "import sys, phalanx.planner.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
