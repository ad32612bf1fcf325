from pathlib import Path

import pytest

from phalanx.bench.ceiling import Ceiling
from phalanx.bench.picture import draw_ceiling
from phalanx.measure.products import MatmulPoint


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
