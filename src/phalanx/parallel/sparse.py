"""Reduce the sparse gradients of `nn.Embedding(sparse=True)`; ranks look up different rows.

The reduced gradient has the rows that any rank has looked up, as on one process, and optimizers
such as SparseAdam update only these rows. The all-reduce covers the full table, because torch has
no sparse all-reduce on every backend. The result is sparse again, for the optimizer.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import nn
from typing_extensions import override

from phalanx.comm.axes import DENSE
from phalanx.comm.ledger import Phase, no_phase
from phalanx.models.decoder import Embedding
from phalanx.parallel.reduce import GradientReducer, WrappingReducer


def sparse_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return module name -> weight of each trained embedding table with sparse gradients."""
    return {
        name: cast(nn.Parameter, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | Embedding)
        if module.sparse and module.weight.requires_grad
    }


class SparseReducer(WrappingReducer):
    """Reduces the gradients of sparse tables after backward; `dense` reduces all others."""

    def __init__(self, tables: list[nn.Parameter], dense: GradientReducer) -> None:
        super().__init__([*dense.parameters, *tables], dense.comm, dense)
        self._tables = tables

    @override
    def set_trained(self, trained: list[nn.Parameter]) -> bool:
        """Pass the dense parameters to their reducer; a frozen table has no gradient to reduce."""
        dense = [each for each in trained if not any(each is table for table in self._tables)]
        return self._inner.set_trained(dense)

    @override
    @torch.no_grad()
    def finish(self, phase: Phase = no_phase) -> None:
        """Complete the sums over dp, of dense gradients and then of sparse ones."""
        super().finish(phase)
        with phase("agree"):
            is_used = self.any_rank_used([table.grad is not None for table in self._tables])
        with phase("reduce"):
            # Rows of a table of five:    rank 0  . x . . x    rank 1  x x . . .    any  x x . . x
            # The flags keep rows that a rank has looked up, although their sum may be zero.
            for table in itertools.compress(self._tables, is_used):
                total = torch.zeros_like(table)
                has_rows = torch.zeros(len(table), dtype=torch.uint8, device=table.device)
                if (grad := table.grad) is not None:
                    total.add_(grad)
                    has_rows[grad.coalesce().indices()[0] if grad.is_sparse else slice(None)] = 1
                self.comm.all_reduce(has_rows, DENSE.sums, "max")
                self.comm.all_reduce(total, DENSE.sums)
                rows = has_rows.nonzero()
                table.grad = torch.sparse_coo_tensor(
                    rows.T, total[rows[:, 0]], table.shape, is_coalesced=True,
                    check_invariants=False,
                )  # fmt: skip
