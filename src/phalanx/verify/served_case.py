"""The steps of a case with parameter servers, which run as threads of the first rank.

After each step, the summed gradients, weights and moments are copied from the servers to the
workers, so that they are compared as under any other strategy.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from phalanx.comm.comm import SingleRankComm
from phalanx.comm.together import barrier, broadcast_object
from phalanx.config.schema import ServerConfig
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import local_roles
from phalanx.strategy import Strategy
from phalanx.train.served_step import ClockedStep
from phalanx.train.step import Step, StepResult


class ServedCase:
    """One rank's client of the servers for a case; on rank 0, the servers too."""

    def __init__(self, strategy: Strategy, rank: int, num_steps: int) -> None:
        """Start the servers on rank 0, and connect; every rank calls this together."""
        self._open = ExitStack()
        meeting = self._open.enter_context(local_roles()).meeting if rank == 0 else None
        self._rank, meeting = rank, broadcast_object(meeting)
        consistency = Consistency(strategy.dp.kind, strategy.dp.degree, strategy.dp.option or 0)
        self._client = Client(meeting, rank, consistency, (0, num_steps))

    def step(self, *args: Any, **more: Any) -> Step:
        """Return a step over the servers, built from the arguments of `Step`."""
        self._step = _Witnessed(*args, **more, comm=SingleRankComm())
        self._step.join(self._client, ServerConfig(), is_first=self._rank == 0)
        return self._step

    def close(self) -> None:
        """Disconnect from the servers and stop them; every rank calls this together."""
        self._client.close()
        barrier()
        self._open.close()


class _Witnessed(ClockedStep):
    """Step that copies the servers' gradients, weights and moments back to the worker."""

    def compute_gradients(self, microbatches: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made = super().compute_gradients(microbatches)
        flats = [torch.empty_like(flat) for flat in self.flat.weights]
        self.client.gradient(flats, self.steps_done + 1)
        self.flat.give_gradients([flat / made[1].clamp(min=1) for flat in flats])
        barrier()  # the first pull applies the sum, so all ranks read the gradient before it
        return made

    def apply_gradients(self, loss: torch.Tensor, num_valid: torch.Tensor) -> StepResult:
        result = super().apply_gradients(loss, num_valid)
        self.before_save()
        barrier()
        return result
