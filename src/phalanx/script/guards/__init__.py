"""Guards of a user's loop: each observes a step, and refuses or names one way to a wrong number.

| guard | prevents | looks |
|---|---|---|
| `at_prepare` | splits that change what a model computes | at `prepare` |
| `LossGuard` | a gradient of some rows, or of rows counted twice | at each backward |
| `ModelGuard` | updates of tensors that the forward does not use | as a step begins, at a save |
| `warn_of_buffers` | an evaluation that depends on the rank | once, as step 2 begins |
| `DrawGuard` | the same noise for the rows of all ranks | at batches and backwards |
| `Replicas` | ranks that train different models | as a step begins, at saves, at the end |
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.script.guards.loss import LossGuard
from phalanx.script.guards.model import ModelGuard
from phalanx.script.guards.random_draws import DrawGuard
from phalanx.script.guards.replicas import Replicas


class Guards(NamedTuple):
    """The guards of a step that have a state."""

    loss: LossGuard
    model: ModelGuard
    draws: DrawGuard
    replicas: Replicas
