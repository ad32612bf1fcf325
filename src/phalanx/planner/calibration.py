"""Clusters from measurements: this machine, and other machines by their calibration files.

A device is a GPU, or, without GPUs, an equal part of the cores for each rank. A value that the
calibration file does not have is measured in a few seconds, or assumed.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from phalanx.account import host
from phalanx.errors import ConfigError, PhalanxError
from phalanx.planner.calibration_file import THIS, Calibration, Compute, keep, path_of, read
from phalanx.planner.machine import ARITHMETICS, Cluster, Core, Device, Level, Link, OpCost

_DAYS: Final = 7
"""Days for which a measurement that a run kept holds."""

_ASSUMED = Link(
    name="gloo in one host",
    bandwidth=1e9,
    latency_s=1e-4,
    source="assumed to have 1 GB/s until phalanx bench comm --write this measures them",
    date="2026-01",
    measured={
        op: OpCost(latency_s=2e-4, bandwidth=1.2e9)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send")
    },
)


ASSUMED: Final = Compute(
    best={"bfloat16": 5e11, "float32": 1e11},
    sustained={"bfloat16": 4e11, "float32": 8e10},
    bandwidth=8e9,
    memory_bytes=4e9,
    date="2026-11",
    core=Core(
        products={"bfloat16": 4e11, "float32": 8e10},
        attention={"bfloat16": 5e10, "float32": 4e10},
        operator_s=1e-5,
    ),
    source="assumed for one core; phalanx bench ceiling --write this measures it",
)
"""Assumed rates of one core of a server CPU, for a machine without measurements."""


def blank(kind: Literal["gpu", "cpu"]) -> Calibration:
    """Return a calibration of this machine's GPUs or CPU without any measurements."""
    import torch

    if kind == "gpu":
        return Calibration(
            kind=kind,
            device_name=torch.cuda.get_device_name(),
            num_here=torch.cuda.device_count(),
            conditions=torch.__version__,
        )
    from phalanx.launch.local import num_cores
    from phalanx.measure.environment import cpu_flags, cpu_name

    return Calibration(
        kind=kind,
        device_name=cpu_name(),
        num_here=num_cores(),
        conditions=" ".join([torch.__version__, *sorted(cpu_flags())]),
    )


def _path_of_ranks(num_ranks: int) -> Path:
    """Return the path of what runs of `num_ranks` ranks on this host have measured."""
    return path_of(THIS).with_name(f"measured-{num_ranks}.json")


def keep_measured(machine: Calibration, num_ranks: int) -> None:
    """Keep the measurement of a run in the user's cache folder, if the folder can be written."""
    with suppress(OSError, PhalanxError):
        path = _path_of_ranks(num_ranks)
        path.unlink(missing_ok=True)  # `keep` would merge it
        keep(path, machine)


def kept_by(num_ranks: int, machine: Calibration, precision: str = "") -> Calibration | None:
    """Return what a run of `num_ranks` measured on `machine`; None if it no longer holds.

    A file of another CPU, number of cores, version of torch or week, a damaged file, and one
    without rates in `precision` do not hold.
    """
    try:
        kept = read(_path_of_ranks(num_ranks))
        compute = kept.compute
        if compute is None or not (core := compute.core) or {precision} - {*core.products, ""}:
            return None
        age = datetime.date.today() - datetime.date.fromisoformat(compute.date)
    except (OSError, PhalanxError, ValueError):
        return None
    same = ("kind", "device_name", "num_here", "conditions")
    is_same = all(getattr(kept, of) == getattr(machine, of) for of in same)
    return kept if is_same and 0 <= age.days <= _DAYS else None


def of_user(machine: Calibration) -> Calibration:
    """Return the user's calibration of a blank `machine`, or `machine` without one.

    Raises:
        ConfigError: the calibration file is damaged.
    """
    path = path_of(THIS)
    file = read(path) if path.exists() else machine
    is_same = (file.kind, file.device_name) == (machine.kind, machine.device_name)
    return dataclasses.replace(file, num_here=machine.num_here) if is_same else machine


def this_machine(num_devices: int | None = None, otherwise: Compute | None = None) -> Cluster:
    """Return this machine as a cluster of `num_devices`: GPUs, or any number of ranks on a CPU.

    Its rates are from the user's calibration file, else `otherwise`, else from the file that a run
    of equally many ranks kept, else from a short measurement.

    Raises:
        ConfigError: the machine has fewer GPUs, `num_devices` is below 1, or the calibration file
            is damaged.
    """
    import torch

    machine = blank("gpu" if host.may_have_gpu() and torch.cuda.is_available() else "cpu")
    kept = kept_by(num_devices or machine.num_here, machine) if otherwise is None else None
    machine = of_user(machine).filled(kept)
    if compute := machine.compute or otherwise:
        compute = dataclasses.replace(compute, memory_bytes=memory_bytes(machine))
    return as_cluster(THIS, dataclasses.replace(machine, compute=compute), num_devices)


def as_cluster(name: str, machine: Calibration, num_devices: int | None = None) -> Cluster:
    """Return a calibrated machine as a cluster of `num_devices`; measure missing rates here.

    Raises:
        ConfigError: the machine has fewer GPUs, or `num_devices` is below 1.
    """
    num_there = machine.num_hosts * machine.num_here
    if num_devices is not None and num_devices < 1:
        raise ConfigError(
            f"{name} has 1 device or more, not {num_devices}; the nearest is {name}:1"
        )
    num = num_devices or num_there
    if machine.kind == "gpu":
        device, num_ranks = _gpu(name, machine), num_there
    else:  # ranks share the cores
        num_cores = num_there / num  # of a rank; it may be a fraction
        compute = machine.compute or measure(machine, ("float32", "bfloat16"))
        rates = dataclasses.replace(
            compute,
            best={of: num_cores * rate for of, rate in compute.best.items()},
            sustained={of: num_cores * rate for of, rate in compute.sustained.items()},
            bandwidth=num_cores * compute.bandwidth,
            memory_bytes=num_cores * compute.memory_bytes,
        )
        device, num_ranks = _measured(name, machine, rates), num
        core = compute.core or ASSUMED.core
        device = dataclasses.replace(device, core=core, cores=num_cores)
    links = {level.name: level.link for level in machine.levels}
    inside, between = links.get("server"), links.get("cluster", _ASSUMED)
    if inside is None:  # the catalog's link within a host, or an assumed one
        from phalanx.planner.hardware import CLUSTERS

        known = CLUSTERS.get(device.name)
        inside = known.levels[0].link if known else _ASSUMED
    # A file of one host has a level inside the server, a file of several hosts both; a host of a
    # single rank has no level inside.
    num_inside = max(1, num_ranks // machine.num_hosts)
    levels: list[Level] = []
    if num_inside > 1 or machine.num_hosts == 1:
        levels.append(Level(name="server", devices=num_inside, link=inside))
    if machine.num_hosts > 1:
        levels.append(Level(name="cluster", devices=num_ranks, link=between))
    whole = Cluster(
        name=name,
        title=device.title,
        device=device,
        levels=tuple(levels),
        num_devices=num_ranks,
    )
    return whole.of(num)


def _gpu(name: str, machine: Calibration) -> Device:
    """Return the catalog's GPU with its measured efficiency, or a device of measured rates only."""
    from phalanx.planner.hardware import DEVICES

    compute = machine.compute
    known = [one for one in DEVICES.values() if one.driver == machine.device_name]
    if not known:
        return _measured(name, machine, compute or measure(machine, ("float32", "bfloat16")))
    if compute is None or "bfloat16" not in compute.best:
        return known[0]
    return dataclasses.replace(
        known[0],
        matmul_efficiency=min(1.0, compute.best["bfloat16"] / known[0].flops),
        efficiency_source=f"measured by phalanx bench ceiling ({compute.date})",
    )


def _measured(name: str, machine: Calibration, compute: Compute) -> Device:
    types = [of for of in ARITHMETICS if of in compute.best]
    return Device(
        name=name,
        title=machine.device_name,
        kind="gpu" if machine.kind == "gpu" else "cpu",
        year=int(compute.date[:4]),
        peak_flops=dict(compute.best),
        memory_bytes=compute.memory_bytes,
        bandwidth=compute.bandwidth,
        matmul_efficiency=compute.sustained[types[0]] / compute.best[types[0]],
        efficiency_source="the best median over the fastest product",
        source=compute.source,
        date=compute.date,
    )


def measure(machine: Calibration, arithmetics: tuple[str, ...]) -> Compute:
    """Measure the rates of one GPU or one core of this machine in a few seconds."""
    import torch

    from phalanx.measure.environment import has_fast_bfloat16
    from phalanx.measure.products import quick_ceiling

    device = "cuda" if machine.kind == "gpu" else "cpu"
    num_threads, rates = torch.get_num_threads(), dict[str, float]()
    torch.set_num_threads(1)
    try:
        if "float32" in arithmetics:
            rates["float32"] = quick_ceiling(device, "float32")
        if "bfloat16" in arithmetics and has_fast_bfloat16(device):
            rates["bfloat16"] = quick_ceiling(device, "bfloat16")
        compute = compute_of(machine, rates, rates, num_threads=1)
        return dataclasses.replace(compute, source="measured on this machine for this plan")
    finally:
        torch.set_num_threads(num_threads)


def compute_of(
    machine: Calibration,
    best: Mapping[str, float],
    sustained: Mapping[str, float],
    num_threads: int,
) -> Compute:
    """Return the rates of one core from rates of `num_threads` cores, or a GPU's (1 thread)."""
    import torch

    from phalanx.measure.core import measure_core, memory_rate

    core, num_before = None, torch.get_num_threads()
    if machine.kind == "cpu":
        torch.set_num_threads(1)
        try:
            products, attention, operator_s = measure_core()
        finally:
            torch.set_num_threads(num_before)
        core = Core(products=products, attention=attention, operator_s=operator_s)
    return Compute(
        best={of: rate / num_threads for of, rate in best.items()},
        sustained={of: rate / num_threads for of, rate in sustained.items()},
        bandwidth=memory_rate("cpu" if core else "cuda") / num_threads,
        memory_bytes=memory_bytes(machine),
        date=time.strftime("%Y-%m-%d"),
        core=core,
    )


def memory_bytes(machine: Calibration) -> float:
    """Return the memory of one GPU, or the free memory of this host for each core."""
    if machine.kind == "gpu":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    return host.free_memory_bytes() / machine.num_here
