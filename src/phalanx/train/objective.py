"""What is minimised: the sum of the losses of valid tokens, and how many there are.

The loss of a step is one quotient, sum over valid tokens / valid tokens, of the *global* batch. So a model
returns a sum and never a mean: a mean of means weighs a token by how empty its neighbours are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.data.batch import Batch
from phalanx.models.random import row_keys


@dataclass(frozen=True)
class Objective:
    """How a microbatch becomes a loss.

    Attributes:
        loss_sum: (model, microbatch, step) -> 0-d tensor, the sum of the losses of its valid tokens.
        num_valid: microbatch -> number of its valid tokens (or samples: whatever the mean is over).
    """

    loss_sum: Callable[[nn.Module, Any, int], torch.Tensor]
    num_valid: Callable[[Any], int]


def next_token(seed: int, dropout: float = 0.0) -> Objective:
    """Return the objective of a `Decoder` over `Batch`es.

    Args:
        seed: seed of the dropout masks.
        dropout: the model's dropout probability; masks are keyed only where it is above 0.
    """

    def loss_sum(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        keys_B = row_keys(seed, step, batch.rows_B) if dropout and model.training else None
        return model(
            batch.tokens_BT,
            batch.labels_BT,
            positions_BT=batch.positions_BT,
            documents_BT=batch.documents_BT,
            dropout_keys_B=keys_B,
        )

    return Objective(loss_sum, Batch.count_valid)
