"""The memory of this host: what the system and its control groups leave free. No torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RANK_BYTES: Final = 100 << 20
"""Memory that a rank takes for itself, at least, once it has trained a step: 99 to 116 MiB of
private pages for a model of some thousand parameters, on Linux."""

_GROUPS: Final = Path("/sys/fs/cgroup")

_GPU_FILES: Final = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/dxg",
    "/dev/kfd",
    "/proc/driver/nvidia",
)
"""Of these a Linux with a GPU that torch can use has one."""


def may_have_gpu() -> bool:
    """Return False where this host surely has no GPU for torch."""
    return any(Path(file).exists() for file in _GPU_FILES)


def free_memory_bytes() -> int:
    """Return how much more memory the processes of this control group can take, without swap."""
    free = _of_meminfo().get(
        "MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    for limit, used in _limits():
        free = min(free, limit - used)
    return max(free, 0)


def free_swap_bytes() -> int:
    """Return how much of the swap is free."""
    return _of_meminfo().get("SwapFree", 0)


def largest_gpu_bytes() -> int | None:
    """Return the memory of the largest GPU, as its driver says; None if that cannot be asked.

    It asks the driver's own program: torch would occupy the GPU.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return max(int(line) for line in said.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _of_meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", "").split() for line in lines)
    return {row[0]: int(row[1]) * 1024 for row in rows if len(row) == 3}


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group this process is in that has a limit.

    Cached files count as used there, but make room for whoever needs it.
    """
    try:
        own = [line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except (OSError, IndexError):
        own = []
    for base, limit, use in (
        (_GROUPS, "memory.max", "memory.current"),
        (_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        places = {base, *(base / above for path in own for above in _with_parents(path))}
        for place in places:
            limit_bytes, used_bytes = number_in(place / limit), number_in(place / use)
            if limit_bytes is not None and used_bytes is not None:
                yield limit_bytes, max(0, used_bytes - _cached_bytes(place / "memory.stat"))


def _with_parents(path: str) -> list[Path]:
    inner = Path(path.lstrip("/"))
    return [inner, *inner.parents]


def _cached_bytes(stat: Path) -> int:
    try:
        rows = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))


def number_in(path: Path) -> int | None:
    """Return the number a control-group file holds; None if there is none or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
