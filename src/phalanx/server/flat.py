"""Parameters in flat tensors, one per optimizer group, as servers store them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.server.rule import STATE_NAMES


class FlatParameters:
    """The parameters of an optimizer's groups as views of one flat tensor per group.

    Attributes:
        groups: parameters of each group, without tables.
        decays: weight decay of each group.
        weights: flat tensor of each group, of which its parameters are views.
        grads: flat tensor of each group for gradients to push.
        names: names of the optimizer's state tensors of a parameter, without its step count.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rule: str, tables: Collection[nn.Parameter] = ()
    ) -> None:
        """Move the parameters of an optimizer of kind `rule`, except tables, to flat tensors."""
        self.names, self._has_steps = STATE_NAMES[rule], rule == "adamw"
        self.groups: list[list[nn.Parameter]] = []
        self.decays: list[float] = []
        left = set(tables)
        for group in optimizer.param_groups:
            if flat := [each for each in group["params"] if each not in left]:
                self.groups.append(flat)
                self.decays.append(group["weight_decay"])
        self._state = optimizer.state
        #     group 0    | weight [4, 2] | bias [4] |    one flat tensor of 12; both are views
        #
        # A push sends the flat tensor in chunks, and a pull writes into it: no copy for each
        # parameter.
        self.weights = [torch.cat([p.detach().reshape(-1) for p in group]) for group in self.groups]
        self.grads = [torch.zeros_like(each) for each in self.weights]
        for parameter, view in self._views(self.weights):
            parameter.data = view

    def _views(self, flats: Sequence[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its view, of its shape, in flat tensors."""
        for flat, group in zip(flats, self.groups, strict=True):
            pieces = flat.split([p.numel() for p in group])
            for parameter, piece in zip(group, pieces, strict=True):
                yield parameter, piece.view(parameter.shape)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy the parameters' gradients to `grads`; a missing gradient is zeros."""
        for parameter, view in self._views(self.grads):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def give_gradients(self, flats: Sequence[Tensor]) -> None:
        """Set the parameters' gradients to views of `flats`."""
        for parameter, view in self._views(flats):
            parameter.grad = view

    def moments(self) -> tuple[list[list[Tensor]], float]:
        """Return flat copies of each group's state, and the Adam steps; [], 0.0 without state.

        A parameter without state, such as one that was a table when it was saved, gets zeros.
        """
        held = [state for state in self._state.values() if state]
        if not self.names or not held:
            return [], 0.0
        steps = max(float(state["step"]) for state in held) if self._has_steps else 0.0

        def of(parameter: nn.Parameter, name: str) -> Tensor:
            state = self._state[parameter].get(name)
            return torch.zeros(parameter.numel()).to(parameter) if state is None else state.view(-1)

        kept = [
            [torch.cat([of(parameter, name) for parameter in group]) for name in self.names]
            for group in self.groups
        ]
        return kept, steps

    def give_moments(self, kept: Sequence[Sequence[Tensor]], steps: float) -> None:
        """Set the optimizer's state to views of `kept`, as of `steps` steps."""
        for number, name in enumerate(self.names):
            for parameter, view in self._views([of_group[number] for of_group in kept]):
                self._state[parameter][name] = view
                if self._has_steps:
                    self._state[parameter]["step"] = torch.tensor(steps)
