"""Averages of the weights: exponential (EMA), or the mean over all updates (SWA).

    ema = run.average(0.999)             after run.prepare
    optimizer.step(); ema.update()
    with ema.applied():                  the model has the averaged weights inside
        validate(model)

It is `torch.optim.swa_utils.AveragedModel` for shards: each rank averages its shard of each
parameter without communication, and checkpoints store the average as they store the weights.
Buffers are averaged only if asked for; else the model keeps its current buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from phalanx.comm.comm import local_shard
from phalanx.errors import ConfigError, ScriptError
from phalanx.parallel.sharded import free_gathered
from phalanx.script.checks import check_arguments


class WeightAverage:
    """The average of a prepared model's weights.

    Attributes:
        num_updates: number of updates in the average.
        is_applied: whether the model currently has the averaged weights.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        decay: float | None,
        *,
        warmup: bool = False,
        buffers: bool = False,
    ) -> None:
        """Start with 0 updates; average the shards of the `parameters` with requires_grad.

        See `Run.average`.
        """
        check_arguments("average", decay=decay)
        if warmup and decay is None:
            raise ConfigError(
                "average: warmup=True lowers the decay of the first updates, and decay is None, "
                "the mean of all updates; give a decay, such as 0.999"
            )
        self.num_updates = 0
        self.is_applied = False
        self._model = model
        self._decay, self._has_warmup, self._has_buffers = decay, warmup, buffers
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._average = {name: each.detach().clone() for name, each in self._weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average; call it after each optimizer step.

        The first call copies the weights. There is no communication.

        Raises:
            ScriptError: the average is applied.
        """
        if self.is_applied:
            raise ScriptError(
                "average: update() within applied(), where the model has averaged weights"
            )
        average, weights = self._shards()
        if self.num_updates == 0:
            for mine, weight in zip(average, weights, strict=True):
                mine.copy_(weight)
        else:
            count, decay = self.num_updates, self._decay
            if decay is not None and self._has_warmup:
                decay = min(decay, (1 + count) / (10 + count))
            # Annotated, because torch's own type annotations are wider.
            combine: Callable[..., None] = (
                get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
            )
            if average:  # a model without weights to train has none
                combine(average, weights, torch.tensor(count, device=average[0].device))
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """Swap the averaged weights into the model inside the context, to evaluate or export.

        The optimizer must not step inside. Before the first update the weights are unchanged.

        Raises:
            ScriptError: the average is applied already.
        """
        if self.is_applied:
            raise ScriptError("average: applied() within applied()")
        self._swap()
        self.is_applied = True
        try:
            yield
        finally:
            self._swap()
            self.is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the average as shards by parameter name."""
        return {"num_updates": self.num_updates, "average": dict(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            ScriptError: it is the average of another model.
        """
        saved, count = state["average"], state["num_updates"]
        if saved.keys() != self._average.keys() or not (isinstance(count, int) and count >= 0):
            raise ScriptError("average: the state does not belong to an average of this model")
        for name, tensor in self._average.items():
            if saved[name].shape != tensor.shape:
                raise ScriptError(
                    f"average: {name} has the shape {list(saved[name].shape)} in the state, and "
                    f"{list(tensor.shape)} here"
                )
            local_shard(tensor).copy_(local_shard(saved[name]))
        self.num_updates = count

    @torch.no_grad()
    def _swap(self) -> None:
        if self.num_updates == 0:
            return
        free_gathered(self._model)  # else a forward would use weights it gathered before
        for average, weight in zip(*self._shards(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _weights(self) -> dict[str, Tensor]:
        """Return the averaged weights and buffers; a forward may have replaced a buffer."""
        found: dict[str, Tensor] = dict(self._parameters)
        if self._has_buffers:
            buffers = self._model.named_buffers()
            found |= {name: each for name, each in buffers if each.is_floating_point()}
        return found

    def _shards(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's shards of the average and of the weights, in one order."""
        average = [local_shard(each) for each in self._average.values()]
        return average, [local_shard(weight.detach()) for weight in self._weights().values()]
