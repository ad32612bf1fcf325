"""The machine at hand as a cluster: one device for each GPU, or for each core where there is none.

Without a calibration a second of matrix products and a copy in memory stand for it.
"""

from __future__ import annotations

import time
from typing import Final

from phalanx.account import host
from phalanx.planner.machine import Cluster, Device, Level, Link

COPY_BYTES: Final = 64 << 20
"""Memory that is copied to measure its bandwidth; more than the caches of a core."""

_GLOO = Link(
    name="gloo in one host",
    bandwidth=1e9,
    latency_s=1e-4,
    source="assumed: of the order of gloo over the loopback device",
    date="2026-01",
)


def this_machine() -> Cluster:
    """Return the GPUs of this host, or its cores where torch finds no GPU."""
    import torch

    if host.may_have_gpu() and torch.cuda.is_available():
        return _gpus()
    return _cores()


def _gpus() -> Cluster:
    import torch

    from phalanx.planner.hardware import CLUSTERS, DEVICES

    num, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    usable_bytes = torch.cuda.get_device_properties(0).total_memory
    known = [one for one in DEVICES.values() if one.driver == name]
    known.sort(key=lambda one: abs(one.usable_bytes - usable_bytes))
    if known:
        device, link = known[0], CLUSTERS[known[0].name].levels[0].link
    else:
        device, link = _measured(name, "cuda", usable_bytes), _GLOO
    level = Level(name="server", devices=num, link=link)
    return Cluster(name="this", title=name, device=device, levels=(level,), num_devices=num)


def _cores() -> Cluster:
    from phalanx.launch.local import num_cores
    from phalanx.measure.environment import cpu_name

    num = num_cores()
    device = _measured(cpu_name(), "cpu", host.free_memory_bytes() / num)
    level = Level(name="server", devices=num, link=_GLOO)
    title = f"{cpu_name()}, a core each"
    return Cluster(name="this", title=title, device=device, levels=(level,), num_devices=num)


def _measured(name: str, device: str, memory_bytes: float) -> Device:
    """Return a device, one core of a CPU, by a second of measurements."""
    import torch

    from phalanx.measure.environment import has_fast_bfloat16
    from phalanx.measure.products import quick_ceiling

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = {"float32": quick_ceiling(device, "float32")}
        if has_fast_bfloat16(device):
            rates["bfloat16"] = quick_ceiling(device, "bfloat16")
        bandwidth = _copy_bandwidth(device)
    finally:
        torch.set_num_threads(num_threads)
    return Device(
        name="this",
        title=name,
        kind="gpu" if device == "cuda" else "cpu",
        year=int(time.strftime("%Y")),
        peak_flops=rates,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        matmul_efficiency=1.0,
        efficiency_source="the peak is measured",
        source="measured now, for about a second",
        date=time.strftime("%Y-%m-%d"),
    )


def _copy_bandwidth(device: str) -> float:
    """Return bytes/s of memory, read and written, in the fastest of some copies."""
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target, times_s = torch.empty_like(source), list[float]()
    for _ in range(5):
        begun_s = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - begun_s)
    return 2 * COPY_BYTES / min(times_s)
