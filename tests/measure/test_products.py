import time

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.measure import products
from phalanx.measure.products import MatmulPoint, checked_device, measure_matmul, quick_ceiling

QUICK_S = products._QUICK_S
"""Of users: `short_measurements` shortens it, after the tests are read."""


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


def test_quick_ceiling_is_quick_and_restores_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_QUICK_S", QUICK_S)
    begin_s = time.process_time()  # of both threads
    rate = quick_ceiling("cpu", "float32")
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


@pytest.mark.parametrize("num_here", [1, 1000])
def test_a_rate_of_ranks_that_take_turns_is_of_all_products(
    num_here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last size has a whole core, which other ranks have left."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_here))
    seconds = iter((4.0, 4.0, 4.0, 1.0))
    points: list[MatmulPoint] = []

    def measured(
        _: object, __: object, rows: int, inner: int, columns: int, *___: object, **____: object
    ) -> MatmulPoint:
        each = next(seconds)
        point = MatmulPoint(
            num_rows=rows, inner=inner, num_columns=columns,
            repeats=2, mean_s=each, median_s=each, best_s=each,
        )  # fmt: skip
        points.append(point)
        return point

    monkeypatch.setattr(products, "measure_matmul", measured)
    rate = quick_ceiling("cpu", "float32")
    best = max(point.flops / point.best_s for point in points)
    of_all = sum(point.flops for point in points) / 13
    assert rate == pytest.approx(best if num_here == 1 else of_all)
    assert best > 1.2 * of_all
