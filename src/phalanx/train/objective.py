"""The quantity to minimise: the sum of the losses of valid tokens, and their number.

The loss of a step is one quotient, sum over valid tokens / valid tokens, of the *global* batch. So
a model returns a sum and never a mean: a mean of means weighs a token by how empty its neighbours
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.data.batch import Batch
from phalanx.errors import ConfigError
from phalanx.models.attention import documents_of
from phalanx.models.loss import IGNORE
from phalanx.models.random import row_keys


class Objective(Protocol):
    """How a microbatch becomes a loss. An objective is pickled on its way to the ranks.

    It may have a method more, which evaluations call in eval mode, once a batch:

        def metric_sums(self, model, microbatch) -> Mapping[str, Tensor | tuple[Tensor, Tensor]]

    It returns sums over the rows by the names of the metrics. A metric is the sum over all rows and
    ranks / the sum of `num_valid`, or of the count that stands beside it. Its call of the model is
    a second forward.
    """

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> torch.Tensor:
        """Return the sum of the losses of the microbatch's valid tokens, a 0-d tensor."""
        ...

    def num_valid(self, microbatch: Any) -> int | torch.Tensor:
        """Return how many tokens (or samples: whatever the mean is over) are valid.

        A 0-d tensor on the device of the microbatch spares a GPU a wait.
        """
        ...


@dataclass(frozen=True)
class NextToken:
    """The objective of a `Decoder` over `Batch`es.

    Attributes:
        seed: of the dropout masks.
        dropout: the model's dropout probability; masks are keyed only where it is above 0.
    """

    seed: int = 0
    dropout: float = 0.0

    def loss_sum(self, model: nn.Module, microbatch: Batch, step: int) -> torch.Tensor:
        """Return the sum of the cross-entropies in nats."""
        has_masks = self.dropout > 0 and model.training
        keys_B = row_keys(self.seed, step, microbatch.rows_B) if has_masks else None
        return model(
            microbatch.tokens_BT,
            microbatch.labels_BT,
            positions_BT=microbatch.positions_BT,
            documents_BT=documents_of(microbatch.documents_BT, microbatch.tokens_BT.device),
            dropout_keys_B=keys_B,
        )

    def num_valid(self, microbatch: Batch) -> torch.Tensor:
        """Return how many labels are not IGNORE."""
        return (microbatch.labels_BT != IGNORE).sum()


def check_build(where: str, build: Any) -> nn.Module:
    """Return a module of `build`, which has to make a new one each time that it is called.

    Raises:
        ConfigError: it is a module itself, or returns none, or one that it returned before.
    """
    made = build if isinstance(build, nn.Module) else build()
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{where}: build returns a {type(made).__name__}; expected a torch.nn.Module"
        )
    if made is not build and made is not build():
        return made
    what = "is a" if made is build else "returns, each time, the same"
    raise ConfigError(
        f"{where}: build {what} {type(made).__name__}, and a strategy splits a module in place; "
        "expected a function that returns a new module with its first weights each time, such as "
        "functools.partial(copy.deepcopy, model)"
    )
