"""What a forward changes by the rows that it sees, of which each rank has others."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import nn

from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.errors import ConfigError
from phalanx.script.drift import digest_of


def refuse_max_norm(model: nn.Module) -> None:
    """Refuse tables whose rows a forward scales: each rank would scale others."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and dist.get_world_size() > 1:
            raise ConfigError(
                f"{type(module).__name__} '{name}' has a max_norm, by which a forward changes the "
                "weights of the rows that this rank sees, and no other rank hears of it; leave it "
                "out, and scale the output instead"
            )


def warn_of_buffers(model: nn.Module, comm: Comm) -> None:
    """Warn of buffers that data ranks have moved apart; every rank calls this together.

    Nothing adds them up: evaluation uses each rank's own, and a checkpoint has the first rank's.
    """
    if comm.size("data") == 1:
        return
    own = {name: digest_of([buffer]) for name, buffer in model.named_buffers()}
    place = tuple(comm.coord(axis) for axis in comm.axes if axis not in comm.axes_of("data"))
    first: dict[tuple[int, ...], dict[str, str]] = {}
    apart: set[str] = set()
    for where, theirs in gather_objects((place, own)):
        mine = first.setdefault(where, theirs)
        apart |= {name for name in mine if theirs.get(name) != mine[name]}
    if apart and comm.is_first:
        names = ", ".join(sorted(apart)[:3]) + (" and more" if len(apart) > 3 else "")
        warnings.warn(
            f"the buffers {names} differ between ranks after a step: the forward moves them by "
            "this rank's rows, and nothing adds them up; use run.sum for what they count, or "
            "expect other numbers than on one process",
            stacklevel=3,
        )
