"""Training objectives: the sum of the losses of valid tokens, and the number of valid tokens.

The loss of a step is one quotient over the *global* batch, loss sum / valid tokens. So a model
returns a sum and never a mean: a mean of microbatch means would give a token more weight in a
microbatch with fewer valid tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.data.samples import Batch
from phalanx.errors import ConfigError
from phalanx.models.attention import documents_of
from phalanx.models.loss import IGNORE
from phalanx.models.random import row_keys


class Objective(Protocol):
    """Computes the loss of a microbatch. An objective is pickled to be sent to the ranks.

    An objective may have another method, which evaluations call once a batch, in eval mode:

        def metric_sums(self, model, microbatch) -> Mapping[str, Tensor | tuple[Tensor, Tensor]]

    The method returns, by metric name, a sum over the rows, or a tuple of a sum and a count. The
    metric is the sum over all rows and ranks, divided by the total of the count, or of `num_valid`
    without a count. The method calls the model, so evaluations run a second forward. On a decoder's
    pipeline stage other than the last, it returns what the model does.
    """

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> torch.Tensor:
        """Return the sum of the losses of the microbatch's valid tokens, a 0-d tensor."""
        ...

    def num_valid(self, microbatch: Any) -> int | torch.Tensor:
        """Return the number of valid tokens, or of samples if the mean loss is over samples.

        A 0-d tensor on the microbatch's device avoids a synchronization with the GPU.
        """
        ...


@dataclass(frozen=True)
class NextToken:
    """Next-token cross-entropy of a `Decoder` on `Batch`es.

    Attributes:
        seed: seed of the dropout masks.
        dropout: the model's dropout probability; mask keys are computed only if it is above 0.
    """

    seed: int = 0
    dropout: float = 0.0

    def loss_sum(self, model: nn.Module, microbatch: Batch, step: int) -> torch.Tensor:
        """Return the sum of the cross-entropies in nats."""
        inputs = self.inputs(model, microbatch, step)
        return model(microbatch.tokens_BT, microbatch.labels_BT, **inputs)

    def inputs(self, model: nn.Module, microbatch: Batch, step: int) -> dict[str, Any]:
        """Return the inputs of the decoder besides tokens and labels."""
        has_masks = self.dropout > 0 and model.training
        return {
            "positions_BT": microbatch.positions_BT,
            "documents_BT": documents_of(microbatch.documents_BT, microbatch.tokens_BT.device),
            "dropout_keys_B": (row_keys(self.seed, step, microbatch.rows_B) if has_masks else None),
        }

    def num_valid(self, microbatch: Batch) -> torch.Tensor:
        """Return the number of labels that are not IGNORE."""
        return (microbatch.labels_BT != IGNORE).sum()


def check_build(where: str, build: Any) -> nn.Module:
    """Return a module made by `build`, after checking that each call makes a new module.

    Raises:
        ConfigError: `build` is a module itself, returns another type, or returns the same module
            each time.
    """
    made = build if isinstance(build, nn.Module) else build()
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{where}: build returns a {type(made).__name__}; expected a torch.nn.Module"
        )
    if made is not build and made is not build():
        return made
    kind = type(made).__name__
    what = f"is a {kind}" if made is build else f"returns the same {kind} each time"
    raise ConfigError(
        f"{where}: build {what}, but a strategy splits a module in place; expected a function that "
        "returns a new module with its initial weights in each call, such as "
        "functools.partial(copy.deepcopy, model)"
    )
