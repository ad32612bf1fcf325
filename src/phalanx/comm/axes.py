"""The axes of a job's mesh, and the named sets of axes over which collectives run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

AXIS_SETS: Final[dict[str, tuple[str, ...]]] = {
    "data": ("dp", "fsdp", "ep"),
    "loss": ("pp", "dp", "fsdp", "cp", "ep"),
    "grad": ("dp", "fsdp", "cp", "ep"),
    "expert_grad": ("dp", "fsdp", "cp"),
    "shards": ("fsdp", "cp", "ep"),
    "expert_shards": ("fsdp", "cp"),
    "job": ("pp", "dp", "fsdp", "cp", "ep", "tp"),
}
"""Name of a set -> its axes.

Ranks along `data` have different samples. Ranks along `loss` have partial sums of the loss: cp
splits the positions of a sample, and only the last stage of a pipeline has a loss. Ranks along
`grad` have partial gradients of one parameter, and ranks along `shards` have shards of one
parameter. `expert_grad` and `expert_shards` are these sets for the parameters of experts, of which
each rank of ep has others. `job` is every axis. `tp` is a set too if it has sub-axes such as
`tp_row` and `tp_col`.
"""


@dataclass(frozen=True)
class ParameterAxes:
    """The sets of axes of a parameter.

    Attributes:
        sums: set over which its gradient is a sum, and over which its initial values are equal.
        shards: set over which fsdp shards it.
        split: axis whose ranks hold different parts of it, also without fsdp; empty if none.
    """

    sums: str
    shards: str
    split: str = ""


DENSE: Final = ParameterAxes("grad", "shards")
EXPERT: Final = ParameterAxes("expert_grad", "expert_shards", "ep")
"""The axes of experts' parameters, and of all others:

                       pp   dp           fsdp        cp          ep          tp
    dense      holds   -    a replica    a shard     a shard     a shard     by its layout
               sums         x            x           x           x
    experts    holds   -    a replica    a shard     a shard     own experts by its layout
               sums         x            x           x
"""

_FLATTENED: Final = (DENSE.shards, EXPERT.shards, "tp")
"""Sets that also have a flattened axis with a group, if the job has several of their axes.

fsdp gathers a parameter over its shards in one call; rows and columns of `tp` swap tensors over all
tp ranks.
"""


def axes_of(name: str, axes: Iterable[str]) -> tuple[str, ...]:
    """Return the subset of the mesh's `axes` that `name` means; possibly none.

    `name` is an axis, a set or a flattened axis. `tp` stands for all sub-axes of tp, such as
    `tp_row` and `tp_col`.
    """
    axes = tuple(axes)
    if name in axes:
        return (name,)
    members = AXIS_SETS.get(name, tuple(name.split("_")))  # fsdp_cp: the axes fsdp and cp
    if not {*members}.issubset(AXIS_SETS["job"]):  # such as tp_row, in a job without it
        return ()
    return tuple(axis for axis in axes if axis.split("_")[0] in members)


def flattened(axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return name -> member axes of each flattened axis of a job with `axes`.

    The name joins the members that the job has: `fsdp_cp`, `fsdp_ep`, `fsdp_cp_ep`, or `tp`.
    """
    axes = tuple(axes)
    found = (axes_of(name, axes) for name in _FLATTENED if name == "tp" or "fsdp" in axes)
    return {_joined(members): members for members in found if len(members) > 1}


def single_axis(name: str, axes: Iterable[str]) -> str:
    """Return the one axis with all ranks of a set: its flattened axis, or its only axis."""
    members = axes_of(name, axes)
    return members[0] if len(members) == 1 else _joined(members)


def is_of_shards(axis: str) -> bool:
    """Return whether fsdp gathers and reduces over `axis`, which may be flattened."""
    return axis.split("_")[0] == "fsdp"


def _joined(members: Iterable[str]) -> str:
    return "_".join(dict.fromkeys(axis.split("_")[0] for axis in members))
