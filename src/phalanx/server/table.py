"""A worker's copy of an embedding table, for which it pulls only the rows that a forward uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import TrainingError
from phalanx.server.row_gradient import sparse_of


class Table:
    """A worker's copy of an embedding table.

    Attributes:
        weight: parameter; rows that no forward has looked up since `expire` are outdated.
    """

    def __init__(
        self, name: str, weight: nn.Parameter, modules: Sequence[nn.Module],
        pull: Callable[[Tensor, Tensor], None],
    ) -> None:  # fmt: skip
        """Register hooks by which each forward of `modules` pulls the rows of its ids.

        The ids are the first argument. `pull(rows, table)` copies rows into a table. A forward with
        an id that is not a row raises a TrainingError.
        """
        self.weight, self._name, self._pull = weight, name, pull
        self._is_here = torch.zeros(len(weight), dtype=torch.bool)
        self._here: list[Tensor] = []
        for module in modules:
            module.register_forward_pre_hook(self._look_up, with_kwargs=True)

    def _look_up(self, _: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        ids: Tensor = args[0] if args else more["input"]
        rows = ids.unique().long()
        wrong = rows[(rows < 0) | (rows >= len(self.weight))]
        if len(wrong):
            raise TrainingError(
                f"a sample has the id {int(wrong[0])}, but the embedding {self._name} has rows "
                f"from 0 to {len(self.weight) - 1}"
            )
        rows = rows[~self._is_here[rows]]
        if len(rows):
            self._pull(rows, self.weight.detach())
            self._is_here[rows] = True
            self._here.append(rows)

    def expire(self) -> None:
        """Mark all rows as outdated, so that each is pulled at its next lookup."""
        for rows in self._here:
            self._is_here[rows] = False
        self._here.clear()

    def gradient(self) -> Tensor:
        """Return the gradient, a coalesced sparse tensor.

        Raises:
            TrainingError: the gradient is dense, so the table is used by more than lookups.
        """
        grad = self.weight.grad
        if grad is None:
            return sparse_of(torch.empty(0, dtype=torch.int64), self.weight[:0], self.weight.shape)
        if not grad.is_sparse:
            raise TrainingError(
                f"the gradient of {self._name} is dense: an operation other than a lookup uses the "
                "table, such as a tied output projection; unset server.table_rule to send all rows"
            )
        return grad.coalesce()


class RowAdagradState:
    """The state of row-wise Adagrad for a checkpoint: one number per row of each table.

    Attributes:
        sums: sums of squares of each table; empty before the first checkpoint.
    """

    def __init__(self) -> None:
        self.sums: Sequence[Tensor] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the sums."""
        return {"sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums that `state_dict` returned."""
        self.sums = state["sums"]
