"""Apply a strategy to a model: the one place that knows the order in which the axes are applied."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.parallel import data, recompute
from phalanx.strategy import Strategy, require_built


def parallelize(
    model: nn.Module, strategy: Strategy, mesh: DeviceMesh
) -> data.GradientReducer | None:
    """Split `model`, in place, as `strategy` says.

    Args:
        model: a module with its first weights, on this rank's device.
        strategy: how to split.
        mesh: the mesh that `build_mesh(strategy)` made.

    Returns:
        What reduces the gradients after backward, or None where there is nothing to reduce.

    Raises:
        StrategyError: a part of the strategy is not built yet.
    """
    require_built(strategy)
    recompute.apply(model, strategy.recompute)
    if strategy.dp.degree == 1:
        return None
    return data.apply(model, mesh, cast(data.Kind, strategy.dp.kind))
