"""Measured rates of matrix products on a device: the ceiling that MFU is relative to.

Operands are normal random numbers, because zeros draw less power and run faster than training.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from phalanx.comm.watch import Watch
from phalanx.errors import ConfigError
from phalanx.launch.local import num_cores
from phalanx.measure.peaks import Arithmetic

FEWEST_REPEATS = 3
_MOST_REPEATS = 30
_QUICK_S = 0.3
"""Seconds of each product of `quick_ceiling`."""


@dataclass(frozen=True, kw_only=True)
class MatmulPoint:
    """Times of repeated products of a (num_rows, inner) and an (inner, num_columns) matrix."""

    num_rows: int
    inner: int
    num_columns: int
    repeats: int
    mean_s: float
    median_s: float
    best_s: float

    @property
    def flops(self) -> int:
        """FLOPs of one product."""
        return 2 * self.num_rows * self.inner * self.num_columns

    @property
    def mean_flops_per_s(self) -> float:
        """Rate over all repeats."""
        return self.flops / self.mean_s

    @property
    def median_flops_per_s(self) -> float:
        """Rate of the median repeat."""
        return self.flops / self.median_s

    @property
    def best_flops_per_s(self) -> float:
        """Rate of the fastest repeat."""
        return self.flops / self.best_s


def quick_ceiling(device: torch.device | str, arithmetic: Arithmetic) -> float:
    """Return the best rate, in FLOP/s, over a few products of typical sizes in training.

    It takes about a second. The ranks of one machine should call it at the same time, so that each
    measures the part of the machine that it can use. If the ranks' threads outnumber the cores, the
    result is the rate over all products: a short product may run within one time slice, or after
    other ranks have finished, with a whole core, so the best rate would be too high.

    Raises:
        ConfigError: the device is missing or does not support the arithmetic.
    """
    device = checked_device(device, arithmetic)
    sizes = (
        [(2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)]
        if device.type == "cuda"
        else [(512, 512, 512), (2048, 512, 1408), (1024, 1024, 1024), (768, 768, 768)]
    )
    begin_s, points = time.perf_counter(), list[MatmulPoint]()
    with arithmetic_of(arithmetic) as dtype:
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        are_shared = device.type == "cpu" and num_here * torch.get_num_threads() > num_cores()
        for rows, inner, columns in sizes:
            points.append(measure_matmul(device, dtype, rows, inner, columns, _QUICK_S, fewest=1))
            if time.perf_counter() - begin_s > 1.0:
                break
    if are_shared:
        flops = sum(point.flops * point.repeats for point in points)
        return flops / sum(point.mean_s * point.repeats for point in points)
    return max(point.best_flops_per_s for point in points)


def measure_matmul(
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    inner: int,
    num_columns: int,
    budget_s: float,
    fewest: int = FEWEST_REPEATS,
) -> MatmulPoint:
    """Time one product: a warm-up, then at least `fewest` repeats and more while time is left."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((num_rows, inner), (inner, num_columns))
    a, b = (
        torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)
        for shape in shapes
    )
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
    begin_s = time.perf_counter()
    _time_products(a, b, out, 1)
    times_s: list[float] = []
    while len(times_s) < _MOST_REPEATS:
        if len(times_s) >= fewest and time.perf_counter() - begin_s > budget_s:
            break
        # Several products are queued at once, so that a GPU stays busy.
        times_s += _time_products(a, b, out, 5 if device.type == "cuda" else 1)
    return MatmulPoint(
        num_rows=num_rows,
        inner=inner,
        num_columns=num_columns,
        repeats=len(times_s),
        mean_s=statistics.fmean(times_s),
        median_s=statistics.median(times_s),
        best_s=min(times_s),
    )


def checked_device(device: torch.device | str, arithmetic: Arithmetic) -> torch.device:
    """Return the device; raise ConfigError if it is missing or does not support the arithmetic."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise ConfigError(f"device is '{device}'; it must be cpu, cuda or cuda:INDEX")
    found = torch.device(device)
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ConfigError(
                f"device is '{device}', and torch {torch.__version__} sees {count} CUDA devices "
                "here; use --device cpu, or a lower index"
            )
    elif arithmetic == "tf32":
        raise ConfigError("tf32 exists on CUDA devices only; on the CPU use float32 or bfloat16")
    return found


def arithmetic_in(dtype: torch.dtype, device: torch.device) -> Arithmetic | None:
    """Return the arithmetic of a device's matrix products of `dtype`; None if not in `Arithmetic`.

    This is TF32 for float32 on a GPU whose matmul settings allow TF32.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "float32" and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return cast(Arithmetic, name) if name in get_args(Arithmetic) else None


class ProductTypes(Watch):
    """A recorder of FLOPs by data type, for products inside `with ProductTypes() as types:`."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = Counter[torch.dtype]()

    def dominant(self, device: torch.device) -> Arithmetic | None:
        """Return the arithmetic of most FLOPs; None if no product ran, or if it is unknown."""
        if not self._flops:
            return None
        return arithmetic_in(max(self._flops, key=lambda dtype: self._flops[dtype]), device)

    @override
    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and count its FLOPs if it is a product."""
        result = func(*args, **kwargs)
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            factor = next(each for each in (*args, result) if isinstance(each, Tensor))
            self._flops[factor.dtype] += count(*args, **kwargs, out_val=result)
        return result


@contextmanager
def arithmetic_of(arithmetic: Arithmetic) -> Generator[torch.dtype]:
    """Yield the data type; inside, float32 products on a GPU use TF32 only for `tf32`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        dtype: torch.dtype = getattr(torch, "float32" if arithmetic == "tf32" else arithmetic)
        yield dtype
    finally:
        torch.set_float32_matmul_precision(before)


def _time_products(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, repeats: int
) -> list[float]:
    """Return the seconds of each of `repeats` products, by CUDA events on a GPU."""
    if a.device.type != "cuda":
        times_s: list[float] = []
        for _ in range(repeats):
            begin_s = time.perf_counter()
            torch.mm(a, b, out=out)
            times_s.append(time.perf_counter() - begin_s)
        return times_s
    with torch.cuda.device(a.device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            torch.mm(a, b, out=out)
            event.record()
        events[-1].synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]
