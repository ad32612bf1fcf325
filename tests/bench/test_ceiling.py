import json

import pytest
import torch

import phalanx.bench.ceiling as ceiling_module
from phalanx.bench.ceiling import CeilingConfig, measure_ceiling
from phalanx.measure.products import MatmulPoint
from phalanx.report.output import values_of


def test_ceiling_measures_sizes_that_fit_and_says_why_not_others() -> None:
    found = measure_ceiling(
        CeilingConfig(device="cpu", dtype="float32", max_size=32768, budget_s=0.3)
    )
    assert found.points[0].num_rows == 512
    sizes = [point.num_rows for point in found.points] + [size for size, _ in found.skipped]
    assert sizes == [512 * 2**k for k in range(7)]
    assert found.skipped and all("needs" in reason for _, reason in found.skipped)
    assert found.flops_per_s >= found.sustained_flops_per_s > 1e9
    assert found.peak is None
    assert found.num_threads == 1
    json.dumps(values_of(found), allow_nan=False)


def at_once(
    device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int, budget_s: float
) -> MatmulPoint:
    """Measure nothing: every product has taken a microsecond, however busy the machine is."""
    assert rows == inner == columns
    times = {"mean_s": 1e-6, "median_s": 1e-6, "best_s": 1e-6}
    return MatmulPoint(num_rows=rows, inner=inner, num_columns=columns, repeats=3, **times)


def test_memory_bounds_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_module, "free_memory_bytes", lambda device: 32 * 2**20)
    monkeypatch.setattr(ceiling_module, "measure_matmul", at_once)
    found = measure_ceiling(CeilingConfig(device="cpu", dtype="float32", max_size=2048))
    assert [point.num_rows for point in found.points] == [512, 1024]
    assert "GiB" in found.skipped[0][1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_ceiling_stays_below_its_data_sheet() -> None:
    found = measure_ceiling(
        CeilingConfig(device="cuda", dtype="bfloat16", max_size=8192, budget_s=10)
    )
    assert found.peak is None or found.flops_per_s < found.peak.flops_per_s
