"""Steps of a worker's own, whose difference is pushed after every H of them: `dp:local/H`, DiLoCo.

(Douillard et al., DiLoCo, arXiv 2311.08105, algorithm 1.)

    round c    H steps of one process, from the same weights on each worker
               push how far the weights have moved, in bfloat16 where they are float32
               servers apply the mean by Nesterov momentum; pull where all have moved to

Each worker keeps the moments of its own AdamW, and servers keep the outer momentum. A checkpoint
has both, so it is written at the end of a round: one that is due amid a round waits for it, and the
first worker's push asks the others for their moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.config.schema import ServerConfig
from phalanx.server.client import Client
from phalanx.train.served_step import Recipe, ServedStep
from phalanx.train.step import StepResult


class Rounds:
    """What a checkpoint of `local` has beside weights and the first worker's moments.

    Attributes:
        momentum: of the servers, of each group; nothing before the first round has ended.
        moments: of each worker's optimizer: the two of each group, one group after the other.
        steps: of those optimizers.
    """

    def __init__(self) -> None:
        self.momentum: Sequence[Tensor] = ()
        self.moments: Sequence[Sequence[Tensor]] = ()
        self.steps = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {"momentum": self.momentum, "moments": self.moments, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self.momentum, self.moments = state["momentum"], state["moments"]
        self.steps = float(state["steps"])


class LocalStep(ServedStep):
    """Takes the steps of one worker, and ends its rounds.

    Attributes:
        rounds: beside weights and moments, the state of a checkpoint.
        is_save_due: whether this worker, the first, wants a checkpoint after the round.
        is_save_agreed: whether all have heard so of the round that has just ended.
    """

    is_save_due = is_save_agreed = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rounds = Rounds()

    @override
    def join(self, client: Client, server: ServerConfig, *, is_first: bool) -> None:
        self.steps_a_task = client.consistency.num_local_steps
        super().join(client, server, is_first=is_first)
        self._begin = [flat.clone() for flat in self.flat.weights]
        self._sums = torch.zeros(2, dtype=torch.float64)
        if client.worker < len(self.rounds.moments):
            self._take_moments(self.rounds.moments[client.worker])
        self.rounds.moments = ()

    def _take_moments(self, moments: Sequence[Tensor]) -> None:
        size = len(self.flat.names)
        groups = [moments[at : at + size] for at in range(0, len(moments), size)]
        self.flat.give_moments(groups, self.rounds.steps)

    @property
    @override
    def inner_rule(self) -> str:
        return "adamw"

    @override
    def rule(self) -> dict[str, Any]:
        momentum = self.server.outer_momentum
        return {"name": "nesterov" if momentum else "sgd", "momentum": momentum}

    @override
    def kept(self) -> tuple[list[list[Tensor]], float]:
        return [[flat] for flat in self.rounds.momentum], 0.0

    @override
    def before_save(self) -> None:
        """Bring this worker's moments to the servers; the first gets what all have brought."""
        client, clock = self.client, self.steps_done // self.steps_a_task
        moments, steps = self.flat.moments()
        client.lend(clock, [flat for of_group in moments for flat in of_group])
        if client.worker > 0:
            return
        self.rounds.steps, self.rounds.moments = steps, client.lent(clock)
        flats = [[torch.empty_like(flat) for _ in range(2)] for flat in self.flat.weights]
        has_momentum = client.read(flats) is not None
        self.rounds.momentum = [momentum for _, momentum in flats] if has_momentum else ()

    @override
    def rate(self, clock: int) -> float:
        return self.server.outer_lr

    @override
    def recipes(self) -> list[Recipe]:
        new = [version for version in sorted(self._totals) if version >= self.client.applied]
        return [(version, self.rate(version), 1.0) for version in new]

    @property
    def is_round_over(self) -> bool:
        """Whether the last step was a round's last."""
        return self.steps_done % self.steps_a_task == 0

    @override
    def __call__(self, microbatches: Sequence[Any]) -> StepResult:
        result = super().__call__(microbatches)
        self._sums += torch.tensor([result.loss * result.num_valid_tokens, result.num_valid_tokens])
        if self.is_round_over:
            with self.phase("reduce"):
                self._exchange(self.steps_done // self.steps_a_task - 1)
        return result

    def _exchange(self, clock: int) -> None:
        """Push how far the weights have moved in this round, and pull where all have moved to."""
        client, loss, tokens = self.client, *self._sums.tolist()
        wire = torch.bfloat16 if self._begin[0].dtype == torch.float32 else self._begin[0].dtype
        moved = [(b - now).to(wire) for b, now in zip(self._begin, self.flat.weights, strict=True)]
        client.ask_scheduler("own", clock=clock)
        numbers = {"base": self.version, "tokens": tokens, "loss": loss}
        client.push(clock, client.worker, moved, **numbers, is_save_due=self.is_save_due)
        self._totals = client.totals(clock + 1)
        self.is_save_due, self.is_save_agreed = False, bool(self._totals[clock][0][3])
        self.pull(clock + 1)
        for begin, now in zip(self._begin, self.flat.weights, strict=True):
            begin.copy_(now)
        self._sums.zero_()
