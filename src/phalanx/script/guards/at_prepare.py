"""Models that no split computes right; `prepare` refuses them before it changes anything."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.errors import ConfigError, ScriptError
from phalanx.script.checksums import first_unequal_rank


def refuse_max_norm(model: nn.Module) -> None:
    """Refuse embeddings with max_norm: each rank would rescale other rows of its replica."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and dist.get_world_size() > 1:
            raise ConfigError(
                f"{type(module).__name__} '{name}' has a max_norm, so a forward rescales the "
                "weights of the rows that this rank looks up, but not their copies on other ranks; "
                "leave max_norm out, and scale the output instead"
            )


def refuse_lost_hooks(model: nn.Module, comm: Comm) -> None:
    """Refuse hooks on parameters that would change a rank's part of a gradient, or be lost."""
    if comm.size("job") == 1:
        return
    are_kept = comm.size("fsdp") == comm.size("tp") == comm.size("ep") == 1
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if after or (parameter._backward_hooks and not are_kept):  # pyright: ignore[reportPrivateUsage]
            call = "register_post_accumulate_grad_hook" if after else "register_hook"
            raise ScriptError(
                f"prepare: {name} has a hook by {call}, which would receive only a part of its "
                "gradient, or none; change parameter.grad between run.backward and "
                "optimizer.step() instead" + ("" if after else ", or use dp")
            )


def refuse_model(model: nn.Module, comm: Comm) -> None:
    """Refuse a model that cannot be split or differs between ranks; all ranks call this.

    Messages of models with other shapes would not match: a sum would mix their parameters.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ScriptError(
            f"prepare: the model is a {type(model).__name__}, which reduces gradients itself; give "
            "the module that it wraps, model.module"
        )
    meta = next((n for n, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ScriptError(
            f"prepare: {meta} is on the meta device, without initial weights; build the model on "
            "the CPU, or give it to phalanx.Trainer"
        )
    models = gather_objects({name: tuple(p.shape) for name, p in model.named_parameters()})
    if (rank := first_unequal_rank(models)) is not None:
        first, theirs = models[0], models[rank]
        name = next(n for n in {**first, **theirs} if first.get(n) != theirs.get(n))
        raise ScriptError(
            f"prepare: the model of rank {rank} differs from rank 0's: {name} is "
            f"{theirs.get(name, 'not there')} on rank {rank} and {first.get(name, 'not there')} on "
            "rank 0; build the same model on every rank"
        )
    refuse_max_norm(model)
    refuse_lost_hooks(model, comm)
