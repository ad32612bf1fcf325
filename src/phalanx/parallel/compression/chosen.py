"""Selection of the gradient compressor: as configured, or the fastest one measured (`auto`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch

from phalanx.comm.axes import DENSE
from phalanx.comm.comm import Comm
from phalanx.errors import ConfigError
from phalanx.parallel.compression.compressor import Compressor
from phalanx.parallel.compression.low_rank import LowRankSum
from phalanx.parallel.compression.rounded import Bf16, Int8, RoundedSum
from phalanx.parallel.reduce import GradientReducer
from phalanx.strategy import Strategy

Compression = Literal["none", "auto", "bf16", "int8", "powersgd"]

COMPRESSORS: Final[Mapping[str, Callable[[Comm], Compressor]]] = {
    "bf16": lambda comm: RoundedSum(comm, Bf16()),
    "int8": lambda comm: RoundedSum(comm, Int8()),
    "powersgd": LowRankSum,
}

MEASURED: Final = ("bf16", "int8")
"""Compressors that `auto` compares with float32: those that only round values."""

PROBE: Final = 1 << 20
"""Number of values in the bucket that `auto` measures."""

ROUNDS: Final = 3
"""Number of timings of each candidate, which alternate; `auto` uses the shortest."""

LEAST_GAIN: Final = 1.2
"""Smallest speedup over float32 for which `auto` selects a compressor."""


def check_compression(
    compression: Compression, strategy: Strategy, precision: str, setting: str = "compress"
) -> None:
    """Check that the strategy and the precision of a run allow gradient compression.

    Raises:
        ConfigError: the strategy has no buckets of dp, or the precision is float16.
    """
    if compression in ("none", "auto"):
        return
    if not _has_buckets(strategy):
        raise ConfigError(
            f"{setting} is {compression}, but {strategy} sums no gradients in buckets of dp; use "
            f"dp2 or more without fsdp, or leave {setting} out"
        )
    if precision == "float16":
        raise ConfigError(
            f"{setting} is {compression} and precision is float16, whose loss scale may change "
            "before the compression errors are added in the next step; the nearest precision is "
            "bfloat16"
        )


def _has_buckets(strategy: Strategy) -> bool:
    dp = strategy.dp
    return dp.degree > 1 and dp.kind == "bucketed" and strategy.fsdp.degree == 1


def compress(
    reducer: GradientReducer | None,
    compression: Compression,
    strategy: Strategy,
    precision: str,
    *,
    is_resumed: bool = False,
) -> str:
    """Set the compressor of a reducer, and return a message to report; it may be empty.

    All ranks of the job must call this together.
    """
    is_allowed = reducer is not None and _has_buckets(strategy) and precision != "float16"
    if reducer is None or compression == "none" or (compression == "auto" and not is_allowed):
        return ""
    name, said = str(compression), ""
    if compression == "auto":
        times_s = measure_seconds(reducer.comm)
        name = fastest(times_s)
        shown = ", ".join(f"{each} {1e3 * time_s:.1f} ms" for each, time_s in times_s.items())
        said = f"gradients are sent as {name}: {PROBE} values take {shown}"
    if name in COMPRESSORS:
        is_taken = reducer.compress(COMPRESSORS[name](reducer.comm))
        assert is_taken, f"{strategy} has buckets of gradients"
        if is_resumed:
            lost = f"{name}: the checkpoint has no compression errors of gradients; they start at 0"
            said = f"{said}\n{lost}".strip()
    return said


def fastest(times_s: Mapping[str, float]) -> str:
    """Return the fastest candidate; float32 unless the speedup is at least `LEAST_GAIN`."""
    name = min(times_s, key=times_s.__getitem__)
    return name if times_s[name] * LEAST_GAIN <= times_s["float32"] else "float32"


def measure_seconds(comm: Comm) -> dict[str, float]:
    """Return the seconds that each candidate takes to sum a bucket, on the slowest rank of the job.

    All ranks of the job must call this together, and all get the same result.
    """
    flat = torch.ones(PROBE, device=comm.device)
    ways: dict[str, Callable[[], object]] = {
        "float32": lambda: comm.all_reduce(flat.fill_(1), DENSE.sums)
    }
    for name in MEASURED:
        compressor = COMPRESSORS[name](comm)
        ways[name] = lambda it=compressor: it.start(0, flat.fill_(1), [flat]).wait()
    rounds = [[_seconds(way, comm) for way in ways.values()] for _ in range(1 + ROUNDS)]
    # The first round also sets up connections, so it does not count.
    times_s = torch.tensor(rounds[1:], device=comm.device).amin(0)
    comm.all_reduce(times_s, "job", "max")
    return dict(zip(ways, times_s.tolist(), strict=True))


def _seconds(way: Callable[[], object], comm: Comm) -> float:
    comm.all_reduce(torch.zeros(1, device=comm.device), "job").cpu()  # a barrier, also for GPUs
    begun_s = time.perf_counter()
    way()
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun_s
