"""What a script's model must be before it is split."""

from __future__ import annotations

from torch import nn

from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.script.buffers import refuse_max_norm
from phalanx.script.hooks import refuse_lost_hooks


def check_model(model: nn.Module, comm: Comm) -> None:
    """Refuse a model that cannot be split, or is not the same on all ranks; all call this.

    Raises:
        ScriptError: says what is wrong with it.
        ConfigError: its forward changes its weights.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ScriptError(
            f"prepare: the model is a {type(model).__name__}, which adds gradients up itself; "
            "give the module that it wraps, model.module"
        )
    meta = next((n for n, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ScriptError(
            f"prepare: {meta} is on the meta device, without first weights; build the model on "
            "the CPU, or give it to phalanx.Trainer"
        )
    _check_alike(model)
    refuse_max_norm(model)
    refuse_lost_hooks(model, comm)


def _check_alike(model: nn.Module) -> None:
    """Refuse models of ranks that are not of one form: their collectives would not meet."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    all_of = gather_objects(own)
    for rank, theirs in enumerate(all_of):
        if theirs != all_of[0]:
            name = next(n for n in {**all_of[0], **theirs} if all_of[0].get(n) != theirs.get(n))
            there, here = theirs.get(name, "not there"), all_of[0].get(name, "not there")
            raise ScriptError(
                f"prepare: the model of rank {rank} is not that of rank 0: {name} is {there} and "
                f"{here}; build the same model on every rank"
            )
