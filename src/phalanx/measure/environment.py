"""The machine and the software versions of a measurement, as plain values for JSON."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed

from phalanx.account import host
from phalanx.launch.local import num_cores

_FAST_BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "arm_bf16", "bf16")
_SHOWN_FLAGS = (
    "avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "neon", "sve", "sve2", "arm_bf16",
)  # fmt: skip

MEMORY_SHARE = 0.6
"""Largest fraction of the free memory that a benchmark may take."""


def environment() -> dict[str, object]:
    """Return versions, processor, memory, GPUs and backends of this machine."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit_bytes = host.number_in(Path("/sys/fs/cgroup/memory.max"))  # of the control group
    # `is_available` first: a driver too old for this PyTorch still counts its GPUs.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_distributed = torch.distributed.is_available()
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "phalanx": package_version("phalanx-train") or "not installed",
        },
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {
            "name": cpu_name(),
            "num_cores": num_cores(),
            "num_threads": torch.get_num_threads(),
            "flags": [flag for flag in _SHOWN_FLAGS if flag in cpu_flags()],
            "fast_bfloat16": has_fast_bfloat16("cpu"),
        },
        "memory_bytes": min(physical_bytes, limit_bytes or physical_bytes),
        "gpus": [
            {"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"}
            for p in map(torch.cuda.get_device_properties, range(num_gpus))
        ],
        "backends": {
            "gloo": has_distributed and torch.distributed.is_gloo_available(),
            "nccl": has_distributed and torch.distributed.is_nccl_available(),
            "mpi": has_distributed and torch.distributed.is_mpi_available(),
            "mkldnn": torch.backends.mkldnn.is_available(),
            "cuda": torch.cuda.is_available(),
        },
    }


def package_version(name: str) -> str | None:
    """Return the installed version, without importing the package; None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_flags() -> set[str]:
    """Return the processor's features that torch reports; empty if this torch reports none."""
    query = getattr(torch.cpu, "get_capabilities", dict[str, object])
    return {flag for flag, has in query().items() if has is True}


def has_fast_bfloat16(device: torch.device | str) -> bool:
    """Return whether the device has hardware bfloat16 products, so that bfloat16 is faster."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return not cpu_flags().isdisjoint(_FAST_BFLOAT16_FLAGS)


def device_name(device: torch.device | str) -> str:
    """Return the name of the GPU, or of the processor for the CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the processor's name as the operating system reports it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_memory_bytes(device: torch.device | str) -> int:
    """Return the bytes that this process can still allocate on the device."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host.free_memory_bytes()
