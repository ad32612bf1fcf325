"""Expert parallelism: each rank has other samples, and some of the experts.

Idea      An expert is on one rank of ep, and tokens travel to their experts (Lepikhin et al.,
          GShard, 2021, section 3). All other parameters are replicated, as over dp, or sharded by
          fsdp.
Layout    gate, up [E_ep, F, D]  down [E_ep, D, F]: of N ranks, rank r has experts r E/N up to
          (r + 1) E/N - 1.
Backward  An expert has the tokens of all ranks of ep, so its gradient is partial only over dp, fsdp
          and cp (`comm.axes.EXPERT`); all other gradients are partial over ep, too.
Limits    N divides the number of experts.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from phalanx.comm.axes import EXPERT
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.dry_run import CountingComm
from phalanx.errors import StrategyError
from phalanx.parallel.skeleton import experts_of
from phalanx.parallel.split import Split, Target
from phalanx.strategy import Strategy


class ExpertSplit(Split):
    """The experts of a model, split over the ranks of ep.

    Raises:
        StrategyError: the model has no experts, or their number is not a multiple of the ranks.
    """

    axis = "ep"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        strategy, model = target.strategy, target.skeleton.model
        degree, text = strategy.ep.degree, str(Strategy(ep=strategy.ep))
        numbers = {len(p) for module in experts_of(model).values() for p in module.parameters()}
        if not numbers:
            data = strategy.with_degree("ep", 1).with_degree("dp", strategy.dp.degree * degree)
            raise StrategyError(
                f"{text}: the {type(model).__name__} has no experts that ep could split; write "
                f"'{data}'"
            )
        if any(number % degree for number in numbers):
            most = math.gcd(*numbers)
            legal = [each for each in range(1, most + 1) if most % each == 0]
            near = min(legal, key=lambda each: (abs(each - degree), each))
            raise StrategyError(
                f"{text}: a layer has {' or '.join(map(str, sorted(numbers)))} experts, which is "
                f"not a multiple of {degree}; write '{strategy.with_degree('ep', near)}'"
            )

    def next_target(self) -> Target:
        """Return the target with the shapes and the axes of the experts of one rank."""
        target, degree = self.target, self.target.strategy.ep.degree
        experts = [weight for weight in target.skeleton.weights if weight.is_expert]
        shapes = {w: (w.shape[0] // degree, *target.shape(w)[1:]) for w in experts}
        return dataclasses.replace(
            target,
            shapes={**target.shapes, **shapes},
            axes={**target.axes, **dict.fromkeys(experts, EXPERT)},
        )

    def apply(self, model: nn.Module, comm: Ranks) -> None:
        """Replace the parameters of experts by this rank's experts."""
        place_experts(model, comm)


@torch.no_grad()
def place_experts(model: nn.Module, comm: Ranks | CountingComm) -> None:
    """Replace each parameter [E, ..] of experts by a DTensor that ep shards by experts.

    Its mesh is the one of this rank's pipeline stage. Shards of tp stay shards of tp. Every rank
    has the parameter whole: the values of the first one count, as in one process.
    """
    mesh, degree, coord = comm.model_mesh, comm.size(EXPERT.split), comm.coord(EXPERT.split)
    axis = (mesh.mesh_dim_names or ()).index(EXPERT.split)
    for module in experts_of(model).values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements: list[Placement] = [Replicate()] * mesh.ndim
            if isinstance(parameter, DTensor):
                placements = list(parameter.placements)
            placements[axis] = Shard(0)
            whole = local_shard(parameter)
            if not whole.is_meta:
                comm.broadcast(whole, EXPERT.split)
            num = len(whole) // degree
            own = whole[coord * num : (coord + 1) * num].clone()
            shard = DTensor.from_local(
                *(own, mesh, placements),
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
