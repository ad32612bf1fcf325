"""An average of the weights beside the weights: exponential (EMA), or of all updates (SWA).

    ema = run.average(0.999)             after run.prepare
    optimizer.step(); ema.update()
    with ema.applied():                  the model has the averaged weights inside
        validate(model)

It is `torch.optim.swa_utils.AveragedModel` over shards: each rank averages what it holds of each
parameter, so nothing is sent, and a checkpoint has the average as it has the weights. Buffers are
the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from phalanx.comm.comm import local_shard
from phalanx.errors import ScriptError
from phalanx.parallel.sharded import free_gathered
from phalanx.script.checks import check_arguments


class WeightAverage:
    """The average of a prepared model's weights.

    Attributes:
        num_updates: weights that the average is of.
        is_applied: whether the model has the average for its weights now.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], decay: float | None
    ) -> None:
        """Begin without any weights; of `parameters`, shards, the trained ones are averaged."""
        check_arguments("average", decay=decay)
        self.num_updates = 0
        self.is_applied = False
        self._model = model
        self._weights = {name: p for name, p in parameters.items() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._weights.items()}
        # The types of torch's own functions are wider.
        self._combine: Callable[..., None] = (
            get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
        )

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the average; call it after each step of the optimizer.

        The first call takes them as they are. It sends nothing.

        Raises:
            ScriptError: the average is applied.
        """
        if self.is_applied:
            raise ScriptError("average: update() within applied(), where the weights are averages")
        average, weights = self._shards()
        if self.num_updates == 0:
            for mine, weight in zip(average, weights, strict=True):
                mine.copy_(weight)
        else:
            count = torch.tensor(self.num_updates, device=average[0].device)
            self._combine(average, weights, count)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """Give the model the averaged weights inside, to evaluate or export them.

        The optimizer must not step inside. Before the first update the weights stay.

        Raises:
            ScriptError: it is applied already.
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
        """Return how many updates there were, and the average: tensors by name, as shards."""
        return {"num_updates": self.num_updates, "average": dict(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned.

        Raises:
            ScriptError: it is the average of another model.
        """
        saved, count = state["average"], state["num_updates"]
        if saved.keys() != self._average.keys() or not (isinstance(count, int) and count >= 0):
            raise ScriptError("average: the state is of an average of another model, or of none")
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
        free_gathered(self._model)  # else a forward would compute with what it has gathered before
        for average, weight in zip(*self._shards(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _shards(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's shards of the average and of the weights, in one order."""
        average = [local_shard(each) for each in self._average.values()]
        return average, [local_shard(weight.detach()) for weight in self._weights.values()]
