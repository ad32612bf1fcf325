"""The axes of a job's mesh, and the sets of them that collectives name."""

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

`data` holds different samples. `loss` holds terms of the loss: cp splits the positions of a sample,
and of a pipeline the last stage alone has a loss.
`grad` holds terms of the gradient of one parameter. `fsdp_cp` holds shards of one parameter. `job`
is every axis. `tp` is a set too, where it has sub-axes such as `tp_row` and `tp_col`.
"""

SHARDS: Final = "fsdp_cp"
"""The set of axes over which fsdp splits parameters."""

FLATTENED: Final = (SHARDS, "tp")
"""Sets that are one axis too, with a group of their own, where the job has several of their axes.

fsdp gathers a parameter over `fsdp_cp` in one call; rows and columns of `tp` change places over all
of its ranks.
"""

SHARD_AXES: Final = ("fsdp", SHARDS)
"""The names of the axis over which fsdp splits parameters, without cp and beside it."""


def axes_of(name: str, axes: Iterable[str]) -> tuple[str, ...]:
    """Return which of the mesh's `axes` the axis or set of axes `name` means; perhaps none.

    `tp` means all sub-axes of tp, such as `tp_row` and `tp_col`.
    """
    members = AXIS_SETS.get(name, (name,))
    return tuple(axis for axis in axes if axis == name or axis.split("_")[0] in members)


def flattened(axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the flattened axes of a job that has `axes`, with the axes that each is made of."""
    axes = tuple(axes)
    members = {name: axes_of(name, axes) for name in FLATTENED}
    return {name: found for name, found in members.items() if len(found) > 1}


def single_axis(name: str, axes: Iterable[str]) -> str:
    """Return the one axis that has all ranks of a set: of `FLATTENED` itself, or its only axis."""
    first, *others = axes_of(name, axes)
    return name if others else first
