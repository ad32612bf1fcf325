"""A worker's copy of an embedding table, of which it pulls the rows that a forward looks up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import TrainingError
from phalanx.server.row_gradient import sparse_of


class Table:
    """An embedding table of a worker.

    Attributes:
        weight: the parameter; rows that no forward has looked up since `expire` are old.
    """

    def __init__(
        self, name: str, weight: nn.Parameter, modules: Sequence[nn.Module],
        pull: Callable[[Tensor, Tensor], None],
    ) -> None:  # fmt: skip
        """Have each forward of the modules pull the rows of its ids, the first argument.

        `pull` copies rows, whose numbers it is given, into a table. An id that is no row ends the
        forward by a TrainingError.
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
        """Have each row pulled anew when it is looked up next."""
        for rows in self._here:
            self._is_here[rows] = False
        self._here.clear()

    def gradient(self) -> Tensor:
        """Return the gradient, a coalesced sparse tensor.

        Raises:
            TrainingError: it has rows that no forward has looked up.
        """
        grad = self.weight.grad
        if grad is None:
            return sparse_of(torch.empty(0, dtype=torch.int64), self.weight[:0], self.weight.shape)
        if not grad.is_sparse:
            raise TrainingError(
                f"the gradient of {self._name} is dense: something beside its lookups uses the "
                "table, such as a tied output projection; without server.table_rule it moves whole"
            )
        return grad.coalesce()


class RowSums:
    """What row-wise Adagrad keeps of each table, a number for each row, for a checkpoint.

    Attributes:
        sums: of each table; nothing before the first checkpoint.
    """

    def __init__(self) -> None:
        self.sums: Sequence[Tensor] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {"sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self.sums = state["sums"]
