"""Gradients of a user's own loop on one process, in plain PyTorch.

One process and the ranks run the same `run.backward`, so a fault of its arithmetic is on both
sides. So the one process of a comparison computes the gradients of each call by autograd alone:

    losses of rows               gradient of their sum / count
    losses of the whole batch    gradient of the loss

    first call of a step                last call of a step
    keep p.grad, which the script       run.backward(...): bookkeeping of the step
    may have left, and add the          p.grad = kept + sum of the plain gradients
    plain gradient of each call
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PlainLoop:
    """Replaces the `backward` of a run on one process.

    Attributes:
        why: sentence on why gradients of a step come from `run.backward`; None if none are.
    """

    def __init__(self, run: Any) -> None:
        """Replace the method of `run`, which `phalanx.init` has made."""
        self.why: str | None = None
        self._run, self._backward = run, run.backward
        self._kept: list[Tensor | None] = []
        self._sums: list[Tensor | None] | None = None
        run.backward = self.backward

    def backward(self, *args: Any, **given: Any) -> Tensor:
        """Call `run.backward`; after a step's last call, replace the gradients by plain ones."""
        model, step = self._run._prepared.require_model("backward")
        parameters = [p for p in model.parameters() if p.requires_grad]
        if step.num_backwards == 0:
            self._kept = [None if p.grad is None else p.grad.clone() for p in parameters]
            self._sums = [None for _ in parameters]
        plain: Tensor | None = None
        if self._sums is not None:
            try:
                plain = _loss(*args, **given)
                found: Any = torch.autograd.grad(
                    plain, parameters, retain_graph=True, allow_unused=True
                )
            except Exception as error:  # an illegal call, or a graph that allows one backward only
                first = next(iter(str(error).splitlines()), "")
                self._say(f"the graph has no second backward ({first})")
                self._sums = plain = None
            else:
                pairs = zip(self._sums, found, strict=True)
                self._sums = [b if a is None else a if b is None else a + b for a, b in pairs]
        made = self._backward(*args, **given)
        if self._sums is not None and self._run.is_step_end:
            for p, kept, total in zip(parameters, self._kept, self._sums, strict=True):
                if p.grad is None or p.grad.is_sparse:
                    continue
                if total is not None:
                    # `.data`, so that this is no write of the script.
                    p.grad.data.copy_(total if kept is None else total + kept)
                elif not torch.equal(p.grad, torch.zeros_like(p.grad) if kept is None else kept):
                    self._say(
                        "autograd.grad finds no way to them, as through a reentrant checkpoint"
                    )
        return made if plain is None else plain.detach().to(made)

    def _say(self, why: str) -> None:
        self.why = f"gradients of one process come from run.backward where {why}"


def _loss(
    loss: Any = None,
    *,
    weights: Any = None,
    mean_of_rows: Any = None,
    sum_of_rows: Any = None,
    count: Any = None,
    retain_graph: bool = False,
) -> Tensor:
    """Return the loss of a call on one process, in float32 or wider."""
    del retain_graph  # every graph is retained here
    if loss is not None and loss.ndim > 0:
        weights = torch.ones_like(loss) if weights is None else weights
        sum_of_rows, count = (loss * weights)[weights != 0].sum(), weights.sum(dtype=torch.float64)
    if sum_of_rows is not None:
        loss = sum_of_rows / float(count)
    loss = mean_of_rows if loss is None else loss
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
