import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import phalanx.measure.ceiling as ceiling_module
from phalanx.errors import ConfigError
from phalanx.measure.ceiling import (
    Ceiling,
    MatmulPoint,
    checked_device,
    measure_ceiling,
    measure_matmul,
    quick_ceiling,
)
from phalanx.measure.environment import environment
from phalanx.measure.logs import json_text
from phalanx.measure.mlp import measure_mlp
from phalanx.measure.picture import draw_ceiling


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="512"):
        measure_ceiling("cpu", "float32", max_size=100)


@pytest.mark.parametrize(("ending", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_picture_is_drawn_the_same_twice(tmp_path: Path, ending: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    points = tuple(
        MatmulPoint(
            num_rows=size,
            inner=size,
            num_columns=size,
            repeats=3,
            mean_s=2.1e-12 * size**3,
            median_s=2e-12 * size**3,
            best_s=1.9e-12 * size**3,
        )
        for size in (512, 1024, 2048)
    )
    known = Ceiling(
        device="cuda",
        device_name="NVIDIA H200",
        arithmetic="bfloat16",
        num_threads=None,
        points=points,
        skipped=(),
    )
    assert known.peak is not None and known.peak.flops_per_s == 989.4e12
    first, second = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    draw_ceiling(known, first)
    draw_ceiling(known, second)
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()
    if ending == ".svg":
        assert "NVIDIA H200" in first.read_text() and "data sheet 989.4" in first.read_text()


def test_mlp_share_of_the_ceiling_is_a_share() -> None:
    found = measure_mlp("cpu", "float32", num_layers=2, width=256, budget_s=0.2)
    assert found.width == 256 and "as asked" in found.choice
    assert found.utilization.causal.model == 6 * 2 * 256**2 * 256
    share = found.utilization.mfu("ceiling")
    assert share is not None and 0.02 < share <= 1
    assert found.utilization.mfu("data sheet") is None
    assert found.num_steps >= 3
    json.dumps(found.as_dict(), allow_nan=False)


def test_mlp_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        found = measure_mlp("cpu", "float32", num_layers=3, width=64, budget_s=0.01)
    counts = counter.get_flop_counts()["Global"]
    backward_and_forward = found.utilization.causal.model * (1 + found.num_steps)
    # The products that measure the ceiling are counted too, and are no part of the steps.
    linear = sum(count for operation, count in counts.items() if "mm" in str(operation))
    assert linear > backward_and_forward
    assert (linear - backward_and_forward) % (2 * 64**3) == 0


def test_mlp_chooses_a_width_for_the_time() -> None:
    found = measure_mlp("cpu", "float32", num_layers=2, budget_s=0.01)
    assert found.width == 256
    assert "power of two below 8192" in found.choice


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"width": 0}, "at least 1"), ({"num_layers": 0}, "at least 1"), ({"width": 10**6}, "GiB")],
)
def test_mlp_refuses_what_cannot_be(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure_mlp("cpu", "float32", **settings)  # type: ignore[arg-type]


def test_environment_is_json_and_names_the_machine() -> None:
    found = environment()
    text = json_text(found)
    assert torch.__version__ in text
    cpu = found["cpu"]
    assert isinstance(cpu, dict)
    assert cpu["num_cores"] >= 1 and cpu["name"]
    memory_bytes = found["memory_bytes"]
    assert isinstance(memory_bytes, int) and memory_bytes > 2**28
    backends = found["backends"]
    assert isinstance(backends, dict) and backends["gloo"] is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_ceiling_stays_below_its_data_sheet() -> None:
    found = measure_ceiling("cuda", "bfloat16", max_size=8192, budget_s=10)
    assert found.peak is None or found.flops_per_s < found.peak.flops_per_s
