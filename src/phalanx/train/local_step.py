"""The step of `dp:local/H`, DiLoCo: H local optimizer steps, then a push of the weight change.

(Douillard et al., DiLoCo, arXiv 2311.08105, algorithm 1.)

    round c    H local steps on each worker, starting from the same weights
               push the old weights minus the new, in bfloat16 where they are float32
               servers apply the mean by Nesterov momentum; pull the new weights

Each worker keeps the moments of its own AdamW, and servers keep the outer momentum. A checkpoint
has both, so it is written at the end of a round. A save that becomes due within a round waits for
the end; the first worker's push then requests the other workers' moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.config.schema import ServerConfig
from phalanx.server.client import Client
from phalanx.train.served_step import ServedStep, UpdateScale
from phalanx.train.step import StepResult


class Rounds:
    """The state in a `local` checkpoint besides the weights and the first worker's moments.

    Attributes:
        momentum: outer momentum of the servers for each parameter group; empty before the end of
            the first round.
        moments: for each worker, the two moments of each parameter group, group after group.
        steps: step count of the workers' optimizers.
    """

    def __init__(self) -> None:
        self.momentum: Sequence[Tensor] = ()
        self.moments: Sequence[Sequence[Tensor]] = ()
        self.steps = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {"momentum": self.momentum, "moments": self.moments, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the attributes from a `state_dict`."""
        self.momentum, self.moments = state["momentum"], state["moments"]
        self.steps = float(state["steps"])


class LocalStep(ServedStep):
    """The step of one worker, which exchanges the weight change at the end of each round.

    Attributes:
        rounds: state in a checkpoint besides weights and moments.
        is_save_due: whether the first worker requests a checkpoint at the end of the round.
        is_save_agreed: whether all workers received that request in the round that just ended.
    """

    is_save_due = is_save_agreed = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rounds = Rounds()

    @override
    def join(self, client: Client, server: ServerConfig, *, is_first: bool) -> None:
        self.steps_a_task, begin = client.consistency.num_local_steps, self.steps_done
        super().join(client, server, is_first=is_first)
        self._begin = [flat.clone() for flat in self.flat.weights]
        self._sums = torch.zeros(2, dtype=torch.float64)
        if client.worker < len(self.rounds.moments):
            moments, size = self.rounds.moments[client.worker], len(self.flat.names)
            groups = [moments[at : at + size] for at in range(0, len(moments), size)]
            self.flat.give_moments(groups, self.rounds.steps)
        self.rounds.moments = ()
        if self.steps_done > begin:
            # This worker joins after the first round, in place of a lost one. A checkpoint may be
            # due at the end of the latest round, and worker 0 waits for the moments of all workers:
            # send new ones. If the lost worker has sent its moments, servers keep them instead.
            if not self.optimizer.state:
                zeros = [[torch.zeros_like(flat) for _ in self.flat.names] for flat in self._begin]
                self.flat.give_moments(zeros, 0.0)
            if client.worker > 0:
                self.before_save()

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
        """Send this worker's moments to the servers; the first worker collects all workers'."""
        client, clock = self.client, self.steps_done // self.steps_a_task
        moments, steps = self.flat.moments()
        client.upload_state(clock, [flat for of_group in moments for flat in of_group])
        if client.worker > 0:
            return
        self.rounds.steps, self.rounds.moments = steps, client.download_states(clock)
        flats = [[torch.empty_like(flat) for _ in range(2)] for flat in self.flat.weights]
        has_momentum = client.read(flats)[0] is not None
        self.rounds.momentum = [momentum for _, momentum in flats] if has_momentum else ()

    @override
    def rate(self, clock: int) -> float:
        return self.server.outer_lr

    @override
    def recipes(self) -> list[UpdateScale]:
        new = [version for version in sorted(self._totals) if version >= self.client.applied]
        return [(version, self.rate(version), 1.0) for version in new]

    @property
    def is_round_over(self) -> bool:
        """Whether the latest step was the last of a round."""
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
        """Push the change of the weights in this round, and pull the updated weights."""
        client, loss, tokens = self.client, *self._sums.tolist()
        wire = torch.bfloat16 if self._begin[0].dtype == torch.float32 else self._begin[0].dtype
        moved = [(b - now).to(wire) for b, now in zip(self._begin, self.flat.weights, strict=True)]
        client.ask_scheduler("claim", clock=clock)
        numbers = {"base": self.version, "tokens": tokens, "loss": loss}
        client.push(clock, client.worker, moved, **numbers, is_save_due=self.is_save_due)
        self._totals = client.totals(clock + 1)
        self.is_save_due, self.is_save_agreed = False, bool(self._totals[clock][0][3])
        self.pull(clock + 1)
        for begin, now in zip(self._begin, self.flat.weights, strict=True):
            begin.copy_(now)
        self._sums.zero_()
