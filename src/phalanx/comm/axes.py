"""The axes of a job's mesh, and the named sets of axes over which collectives run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

AXIS_SETS: Final[dict[str, tuple[str, ...]]] = {
    "data": ("dp", "fsdp"),
    "loss": ("pp", "dp", "fsdp", "cp"),
    "grad": ("dp", "fsdp", "cp"),
    "fsdp_cp": ("fsdp", "cp"),
    "job": ("pp", "dp", "fsdp", "cp", "tp"),
}
"""Name of a set -> its axes.

Ranks along `data` have different samples. Ranks along `loss` have partial sums of the loss: cp
splits the positions of a sample, and only the last stage of a pipeline has a loss. Ranks along
`grad` have partial gradients of one parameter. Ranks along `fsdp_cp` have shards of one parameter.
`job` is every axis. `tp` is a set too if it has sub-axes such as `tp_row` and `tp_col`.
"""

SHARDS: Final = "fsdp_cp"
"""The set of axes over which fsdp splits parameters."""

FLATTENED: Final = (SHARDS, "tp")
"""Sets that also have a flattened axis with a group, if the job has several of their axes.

fsdp gathers a parameter over `fsdp_cp` in one call; rows and columns of `tp` swap tensors over all
tp ranks.
"""

SHARD_AXES: Final = ("fsdp", SHARDS)
"""Names of the axis over which fsdp splits parameters: without cp, and with cp."""


def axes_of(name: str, axes: Iterable[str]) -> tuple[str, ...]:
    """Return the subset of the mesh's `axes` that the axis or set `name` means; possibly none.

    `tp` stands for all sub-axes of tp, such as `tp_row` and `tp_col`.
    """
    members = AXIS_SETS.get(name, (name,))
    return tuple(axis for axis in axes if axis == name or axis.split("_")[0] in members)


def flattened(axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return name -> member axes of each flattened axis of a job with `axes`."""
    axes = tuple(axes)
    members = {name: axes_of(name, axes) for name in FLATTENED}
    return {name: found for name, found in members.items() if len(found) > 1}


def single_axis(name: str, axes: Iterable[str]) -> str:
    """Return the one axis with all ranks of a set: its flattened axis, or its only axis."""
    first, *others = axes_of(name, axes)
    return name if others else first
