import json
import time

import pytest
import torch

import phalanx.bench.ceiling as ceiling_module
from phalanx.bench.ceiling import (
    MatmulPoint,
    checked_device,
    measure_ceiling,
    measure_matmul,
    quick_ceiling,
)
from phalanx.errors import ConfigError


def test_ceiling_measures_sizes_that_fit_and_says_why_not_others() -> None:
    found = measure_ceiling("cpu", "float32", max_size=32768, budget_s=0.3)
    assert found.points[0].num_rows == 512
    sizes = [point.num_rows for point in found.points] + [size for size, _ in found.skipped]
    assert sizes == [512 * 2**k for k in range(7)]
    assert found.skipped and all("needs" in reason for _, reason in found.skipped)
    assert found.flops_per_s >= found.sustained_flops_per_s > 1e9
    assert found.peak is None
    assert found.num_threads == 1
    json.dumps(found.as_dict(), allow_nan=False)


def test_memory_bounds_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_module, "free_memory_bytes", lambda device: 32 * 2**20)
    found = measure_ceiling("cpu", "float32", max_size=2048, budget_s=2.0)
    assert [point.num_rows for point in found.points] == [512, 1024]
    assert "GiB" in found.skipped[0][1]


def test_a_rate_is_flops_over_time() -> None:
    point = MatmulPoint(
        num_rows=2, inner=3, num_columns=5, repeats=2, mean_s=1.0, median_s=0.5, best_s=0.25
    )
    assert point.mean_flops_per_s == 60.0
    assert point.median_flops_per_s == 120.0
    assert point.best_flops_per_s == 240.0


def test_measured_time_is_that_of_the_product() -> None:
    size = 512
    a, b = torch.randn(size, size), torch.randn(size, size)
    best_s: list[float] = []
    times_s: list[float] = []
    for _ in range(10):  # in turns, since other work comes and goes
        point = measure_matmul(torch.device("cpu"), torch.float32, size, size, size, 0.05)
        best_s.append(point.best_s)
        for _ in range(5):
            begin_s = time.perf_counter()
            torch.mm(a, b)
            times_s.append(time.perf_counter() - begin_s)
    assert min(times_s) / 3 < min(best_s) < 3 * min(times_s)


def test_quick_ceiling_is_quick_and_restores_the_threads() -> None:
    begin_s = time.process_time()  # of both threads
    rate = quick_ceiling("cpu", "float32", num_threads=2)
    assert time.process_time() - begin_s < 6.0
    assert rate > 1e9
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("device", "arithmetic", "words"),
    [
        ("tpu", "float32", "must be cpu, cuda or cuda:INDEX"),
        ("mps", "float32", "must be cpu, cuda or cuda:INDEX"),
        ("cpu", "tf32", "CUDA devices only"),
        ("cuda:99", "float32", "CUDA devices here"),
    ],
)
def test_missing_devices_are_named(device: str, arithmetic: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked_device(device, arithmetic)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_ceiling_stays_below_its_data_sheet() -> None:
    found = measure_ceiling("cuda", "bfloat16", max_size=8192, budget_s=10)
    assert found.peak is None or found.flops_per_s < found.peak.flops_per_s
