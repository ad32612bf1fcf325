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
`grad` holds terms of the gradient of one parameter. `fsdp_cp` holds shards of one parameter where
the job has both; there it is an axis of the mesh too, made of these two. `job` is every axis.
"""


def axes_of(name: str, axes: Iterable[str]) -> tuple[str, ...]:
    """Return those of the mesh's `axes` that `name`, an axis or a set of axes, means; perhaps none.

    `tp` means all sub-axes of tp, such as `tp_row` and `tp_col`.
    """
    members = AXIS_SETS.get(name, (name,))
    return tuple(axis for axis in axes if axis == name or axis.split("_")[0] in members)
