"""How far rounding moves the gradients of a step of a user's own loop on one process.

Some models amplify rounding, so that two correct runs differ: a BatchNorm whose channel varies
little, or a ReLU whose input is nearly 0. So the step is computed again with other roundings:

    forward     keep the arguments of each call of the model, or of a module that the loop calls
    backward    keep the gradients of the outputs of the call
    again       d outputs / d weights, times these gradients: as they are, and with each weight, and
                each output of a module, moved by one rounding, up or down at random

TTrace (arXiv 2506.09280, section 5) moves weights alone; moved outputs show what a sum in another
order does. Errors of ResNet-50 on two ranks are 0.3 to 4 times the movements found so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.data.rows import map_tensors, tensors_of
from phalanx.verify.compare import PERTURBATIONS, compare_values


class _Call(NamedTuple):
    """A call, with its arguments, the type of autocast, and the gradients of its outputs."""

    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    autocast: torch.dtype | None
    gradients: dict[int, Tensor]


class RoundingProbe:
    """The calls of a model in a step, whose gradients it can compute with other roundings.

    Attributes:
        dtypes: real data types of the parameters, and of the outputs of all modules so far.
    """

    def __init__(self, model: nn.Module) -> None:
        """Follow the calls of `model` and of its modules."""
        self.dtypes = {p.dtype.to_real() for p in model.parameters()}
        self._model = model
        self._calls: list[_Call] = []
        self._depth = 0
        self._moves: Callable[[Tensor], Tensor] | None = None
        for module in model.modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def __deepcopy__(self, memo: Any) -> RoundingProbe:
        return self  # a copy of the model has its hooks

    def clear(self) -> None:
        """Forget the calls, at the end of a step."""
        self._calls, self._depth = [], 0

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        # A checkpoint calls modules again in the backward.
        is_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        if self._depth == 1 and torch.is_grad_enabled() and not is_backward:
            # Copies, because a batch that is referenced counts as one that is still to be used.
            arguments = map_tensors((args, kwargs), lambda t: t.detach().clone())
            autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            self._calls.append(_Call(module, arguments, autocast, {}))

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        self._depth -= 1
        if self._moves is not None and isinstance(output, Tensor) and output.is_floating_point():
            return self._moves(output)
        tensors = tensors_of(output)
        self.dtypes |= {tensor.dtype.to_real() for tensor in tensors}
        if self._depth == 0 and self._calls and self._calls[-1].module is module:
            for number, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._calls[-1].gradients.__setitem__, number))

    def movement(
        self, dtype: torch.dtype, counts: dict[str, int], noise: float
    ) -> dict[str, float]:
        """Return the largest relative movement of each gradient, by parameter.

        Args:
            dtype: type whose epsilon moves them.
            counts: see `MaskPosition.calls`, of the last batch.
            noise: see `compare_values`.
        """
        parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        held = (*self._model.parameters(), *self._model.buffers())
        kept = [(each, each.detach().clone()) for each in held]
        still: dict[str, Tensor] = {}
        largest: dict[str, float] = {}
        for seed in (0, *PERTURBATIONS):
            generator, eps = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps
            if seed:
                self._moves = partial(_moved, generator, eps)
                for p in parameters.values():
                    p.data.copy_(self._moves(p.data))
            made, self._moves = self._gradients(parameters, counts), None
            for each, before in kept:
                each.data.copy_(before)  # `.data`, so that this is no write of the script
            still = still or made
            for row in compare_values(0, "gradient", made, still, noise=noise):
                largest[row.name] = max(row.error, largest.get(row.name, 0.0))
        return largest

    def _gradients(
        self, parameters: dict[str, nn.Parameter], counts: dict[str, int]
    ) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        before, (calls, self._calls) = dict(counts), (self._calls, [])
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            torch.manual_seed(0)
            for call in filter(lambda call: call.gradients, calls):
                args, kwargs = map_tensors(call.arguments, Tensor.clone)
                with torch.autocast("cpu", call.autocast, enabled=call.autocast is not None):
                    outputs = tensors_of(call.module(*args, **kwargs))
                found: Any = torch.autograd.grad(
                    [outputs[number] for number in call.gradients],
                    [*parameters.values()],
                    [*call.gradients.values()],
                    allow_unused=True,
                )
                for gradient, each in zip(found, total.values(), strict=True):
                    each.add_(0.0 if gradient is None else gradient)
        self._calls = calls
        counts.clear()
        counts.update(before)
        return total


def _moved(generator: torch.Generator, eps: float, tensor: Tensor) -> Tensor:
    signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    return tensor * (1 + eps * signs)
