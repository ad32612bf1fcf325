"""The least change that makes a loop data parallel: average the gradients before each step.

    loss.backward()
    phalanx.average_gradients(model)         g = sum over ranks (count_r g_r) / sum (count_r)
    optimizer.step()

Every rank holds the whole model, computes the mean loss of its own samples, and takes the same
step. It is what naive data parallelism is, for those who teach or port. `Run.prepare` and
`Run.backward` do the same while backward still runs, in buckets, and check what this cannot.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.comm import Comm, Ranks
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.launch.attach import attach
from phalanx.parallel.reduce import sum_in_buckets

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
"""What has been found to be alike on all ranks."""


def average_gradients(model: nn.Module, count: int | None = None) -> None:
    """Replace each gradient by its mean over the ranks; every rank calls this together.

    A parameter that only some ranks used has a gradient of zeros on the others; one that no rank
    used keeps none. The process joins the job that it was started for, if it has not.

    Args:
        model: each rank has computed gradients of the mean loss of its own samples.
        count: of these samples, where ranks have unlike numbers; each counts alike if None.

    Raises:
        ScriptError: the ranks began with other weights.
    """
    comm = _comm()
    parameters = [p for p in model.parameters() if p.requires_grad]
    if model not in _seen:
        _check_alike([*model.parameters(), *model.buffers()])  # frozen ones too
        _seen.add(model)
    _average(parameters, comm, count)


def DistributedOptimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Have each step of an optimizer average the gradients over the ranks first.

    Its parameters become those of the first rank on all ranks; what it does not step, frozen parts
    and buffers, has to be alike before. The learning rate stays: a batch of N
    ranks is N times as large, and its gradient a mean.

    Returns:
        The optimizer itself.
    """
    comm = _comm()
    for parameter in _parameters_of(optimizer):
        comm.broadcast(parameter, "job")

    def average(own: torch.optim.Optimizer, *_: Any) -> None:
        _average(_parameters_of(own), comm, None)

    optimizer.register_step_pre_hook(average)
    return optimizer


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _comm() -> Ranks:
    device = attach({})
    return _ranks(dist.get_world_size(), device)


@functools.cache
def _ranks(num_ranks: int, device: str) -> Ranks:
    return Ranks({"dp": num_ranks}, device)


@torch.no_grad()
def _average(parameters: Sequence[nn.Parameter], comm: Comm, count: int | None) -> None:
    used = torch.tensor([p.grad is not None for p in parameters], device=comm.device)
    used = comm.all_reduce(used.byte(), "job", "max")
    own = torch.tensor(1.0 if count is None else count, dtype=torch.float64, device=comm.device)
    total = comm.all_reduce(own.clone(), "job")
    share = own / torch.where(total > 0, total, 1.0)
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * share
            )
            gradients.setdefault(parameter.dtype, []).append(parameter.grad)
    for alike in gradients.values():
        sum_in_buckets(alike, comm, comm.axes)


def _check_alike(parameters: Iterable[Tensor]) -> None:
    digest = hashlib.blake2b()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = gather_objects(digest.hexdigest())
    odd = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if odd is not None:
        raise ScriptError(
            f"average_gradients: rank {odd} has other weights than rank 0, and averaged gradients "
            "do not make them equal; call torch.manual_seed(0) before the model is made"
        )
