"""Free memory of this host within its control groups, and the memory of its GPUs. No torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RANK_BYTES: Final = 100 << 20
"""Least memory of a rank's process after one training step, without the model: 99 to 116 MiB of
private pages were measured on Linux with a model of a few thousand parameters."""

_GROUPS: Final = Path("/sys/fs/cgroup")

_GPU_FILES: Final = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/dxg",
    "/dev/kfd",
    "/proc/driver/nvidia",
)
"""Files of GPU drivers: a Linux host with a GPU that torch can use has at least one of these."""


def may_have_gpu() -> bool:
    """Return False if this host certainly has no GPU that torch can use."""
    return any(Path(file).exists() for file in _GPU_FILES)


def free_memory_bytes() -> int:
    """Return the bytes that processes of this control group can still allocate, without swap."""
    free = _of_meminfo().get(
        "MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    for limit, used in _limits():
        free = min(free, limit - used)
    return max(free, 0)


def free_swap_bytes() -> int:
    """Return the bytes of free swap."""
    return _of_meminfo().get("SwapFree", 0)


def largest_gpu_bytes() -> int | None:
    """Return the bytes of the largest GPU's memory; None if `nvidia-smi` does not report any.

    It runs `nvidia-smi` because a query through torch would allocate memory on the GPU.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return max(int(line) for line in said.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _of_meminfo() -> dict[str, int]:
    """Return the rows of /proc/meminfo in bytes; empty if it cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", "").split() for line in lines)
    return {row[0]: int(row[1]) * 1024 for row in rows if len(row) == 3}


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes for each control group of this process that has a limit.

    Cached files are subtracted from `used`, because the kernel evicts them when memory is needed.
    """
    try:
        groups = [line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except (OSError, IndexError):
        groups = []
    for base, limit, use in (
        (_GROUPS, "memory.max", "memory.current"),
        (_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        inner = [Path(path.lstrip("/")) for path in groups]
        places = {base, *(base / above for path in inner for above in (path, *path.parents))}
        for place in places:
            limit_bytes, used_bytes = number_in(place / limit), number_in(place / use)
            if limit_bytes is not None and used_bytes is not None:
                yield limit_bytes, max(0, used_bytes - _cached_bytes(place / "memory.stat"))


def _cached_bytes(stat: Path) -> int:
    try:
        rows = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))


def number_in(path: Path) -> int | None:
    """Return the number in a control-group file; None if it is missing or contains "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
