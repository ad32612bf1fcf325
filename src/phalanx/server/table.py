"""Embedding tables, of which workers pull and push only the rows that a batch looks up.

The gradient of a table is a coalesced sparse tensor of torch. A message represents it by two flat
tensors: the ascending indices of the rows on the receiving server, and the concatenated rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import TrainingError


def sparse_of(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a coalesced sparse tensor of a table's shape with `values` in `rows`.

    Raises:
        ValueError: `rows` are not ascending row indices of the table, or `values` has another size.
    """
    num_rows, width = shape
    in_table = not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < num_rows)
    if rows.dtype != torch.int64 or not in_table or not bool((rows.diff() > 0).all()):
        raise ValueError(f"rows of a table are not ascending numbers from 0 to {num_rows - 1}")
    if values.numel() != len(rows) * width:
        raise ValueError(f"{values.numel()} values; expected {len(rows)} rows of {width}")
    return torch.sparse_coo_tensor(
        rows[None], values.view(-1, width), (num_rows, width), is_coalesced=True,
        check_invariants=False,
    )  # fmt: skip


def flat_parts(tensor: Tensor) -> list[Tensor]:
    """Return the flat tensors of a message for `tensor`: itself, or rows and values if sparse."""
    if not tensor.is_sparse:
        return [tensor]
    return [tensor.indices()[0].contiguous(), tensor.values().reshape(-1)]


class EmbeddingTable:
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
        self._is_pulled = torch.zeros(len(weight), dtype=torch.bool)
        self._pulled: list[Tensor] = []
        for module in modules:
            module.register_forward_pre_hook(self._look_up, with_kwargs=True)

    def _look_up(self, _: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        ids: Tensor = args[0] if args else more["input"]
        # Only rows that this version has not pulled yet are pulled:
        #
        #     batch 1    ids 3 7 3      pull 3 7
        #     batch 2    ids 7 9        pull 9          after `expire`: 7 9
        rows = ids.unique().long()
        wrong = rows[(rows < 0) | (rows >= len(self.weight))]
        if len(wrong):
            raise TrainingError(
                f"a sample has the id {int(wrong[0])}, but the embedding {self._name} has rows "
                f"from 0 to {len(self.weight) - 1}"
            )
        rows = rows[~self._is_pulled[rows]]
        if len(rows):
            self._pull(rows, self.weight.detach())
            self._is_pulled[rows] = True
            self._pulled.append(rows)

    def expire(self) -> None:
        """Mark all rows as outdated, so that each is pulled at its next lookup."""
        for rows in self._pulled:
            self._is_pulled[rows] = False
        self._pulled.clear()

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
